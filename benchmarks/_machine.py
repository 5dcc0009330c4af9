"""What a benchmark ran on, and what processes take; for any interpreter, with nothing installed."""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(*packages: str) -> str:
    """Processor, cores, Python and packages, in a line."""
    found = versions(packages)
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {found}"


def processor() -> str:
    """Model of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> str:
    """The packages that are installed, with their versions."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) or "nothing"


def children(pid: int) -> list[int]:
    """The processes below one, at any depth; on Linux alone."""
    try:
        text = "".join(p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    return [below for each in map(int, text.split()) for below in (each, *children(each))]


def peak_mb(pid: int) -> float:
    """The most memory that a living process has had, in MB; 0 for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) * 1024 / 1e6 if found else 0.0
