"""The installed packages and their uses: the lines of ``recompute-scan doctor``."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from recompute_scan.errors import how_to_add
from recompute_scan.files import content
from recompute_scan.startup import VARIABLE

State = Literal["ok", "missing", "problem"]

# Importing torch takes seconds on a cold disk; longer than this it hangs.
_TORCH_TIMEOUT_S = 120
# In another process: a broken torch ends only that process, and its memory is freed.
# `python -c` looks for modules in the folder where it is started first, which may be a stranger's.
_ASK_TORCH = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "activities": sorted(each.name for each in torch.profiler.supported_activities()),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cuda else [],
    "built_for": torch.version.cuda or torch.version.hip,
}))
"""
# Distributions, one is enough; the extra that brings them; the feature that needs them.
_EXTRAS = (
    (("transformers",), "examples", "examples"),
    (("fsspec",), "remote", "remote traces"),
    (("distributed",), "dask", "Dask (--dask)"),
    (("traceinsight", "HolisticTraceAnalysis"), "hta", "HTA (--hta)"),
)


class Installed(Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        state: ``missing`` is a choice, ``problem`` something to mend.
        purpose: What it is needed for.
        found: The version or device, or the advice.
    """

    state: State
    purpose: str
    found: str


def look() -> list[Installed]:
    """Everything that decides what can be done here, the most needed first."""
    return [_reading(), *_recording(), _launchers(), *map(_extra, _EXTRAS), _py_spy()]


def heading() -> str:
    """The tool, the interpreter and the machine, in one line."""
    about = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"recompute-scan {version('recompute-scan')}, {about}"


def _reading() -> Installed:
    packages = ("numpy", "msgspec", "isal", "zstandard")
    said = ", ".join(f"{name} {version(name)}" for name in packages)
    return Installed("ok", "analyze", said)


def _recording() -> list[Installed]:
    purpose = "run"
    missing = [name for name in ("torch", "wrapt") if _version_of(name) is None]
    if missing:
        said = f"no {' and no '.join(missing)}; {how_to_add('torch')}"
        return [Installed("missing", purpose, said)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, and words of ours
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        said = f"torch does not come up within {_TORCH_TIMEOUT_S} s"
        return [Installed("problem", purpose, said)]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]
        return [Installed("problem", purpose, f"importing torch fails: {last}")]
    except (OSError, ValueError, IndexError) as error:
        return [Installed("problem", purpose, f"torch could not be asked: {error}")]
    return [Installed("ok", purpose, f"torch {found['version']}"), _device(found)]


def _device(found: dict[str, Any]) -> Installed:
    purpose = "GPU activity"
    if found["devices"]:
        first, many = found["devices"][0], len(found["devices"])
        if "CUDA" in found["activities"]:
            return Installed("ok", purpose, f"{many} x {first}")
        said = f"{first} is here, but this torch's profiler cannot record it (no CUPTI)"
        return Installed("problem", purpose, said)
    if found["built_for"]:
        said = "no GPU is seen: CPU operators are recorded"
    else:
        said = "this torch is built for the CPU: CPU operators are recorded"
    return Installed("missing", purpose, said)


def _launchers() -> Installed:
    purpose = "run -- LAUNCHER"
    folders = {sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("-packages"))}
    hooks = [file for folder in folders for file in Path(folder).glob("*.pth") if _is_hook(file)]
    if hooks:
        return Installed("ok", purpose, f"start-up hook {hooks[0].name}")
    said = "recompute_scan.pth is in no site-packages: start the ranks by `run --nproc-per-node`"
    return Installed("problem", purpose, said)


def _is_hook(file: Path) -> bool:
    try:
        return VARIABLE.encode() in content(file)
    except OSError:
        return False


def _extra(wanted: tuple[tuple[str, ...], str, str]) -> Installed:
    names, extra, purpose = wanted
    for name in names:
        if found := _version_of(name):
            return Installed("ok", purpose, f"{name} {found}")
    return Installed("missing", purpose, how_to_add(extra))


def _py_spy() -> Installed:
    purpose = "stacks of a hang"
    if program := shutil.which("py-spy"):
        return Installed("ok", purpose, program)
    return Installed("missing", purpose, "native frames need py-spy: pip install py-spy")


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
