"""Files made to do harm, given to the command itself: refused soon, in one line, status 3."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def string_bomb(path: Path) -> str:
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": [{"ph": "X", "name": "')
        for _ in range(100):
            file.write(b"a" * 4_000_000)
    return "E311"


def climbing_archive(path: Path) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../x", "{}")
        archive.writestr("trace.json", '{"traceEvents": []}')
    return "E317"


def deep_document(path: Path) -> str:
    path.write_bytes(b"[" * 100_000 + b"]" * 100_000)
    return "E312"


def deep_argument(path: Path) -> str:
    inside = b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "ts": 1, "args": {"a": %s}}]}' % inside)
    return "E312"


MAKERS = {
    "trace.json.gz": string_bomb,
    "trace.zip": climbing_archive,
    "trace.json": deep_document,
    "args.json": deep_argument,
}


@pytest.mark.parametrize("name", MAKERS)
def test_refused_in_a_second_with_one_line_and_status_3(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    code = MAKERS[name](file)
    if name == "trace.json.gz":
        assert file.stat().st_size < 450_000
    before = _cpu_seconds()
    command = [sys.executable, "-m", "recompute_scan", "analyze", "--format", "json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    # Of the processor's time: others may use it too. Start-up included.
    assert _cpu_seconds() - before < 1.5
    lines = [line for line in done.stderr.splitlines() if line.startswith("recompute-scan: ")]
    assert len(lines) == 1
    assert lines[0].endswith(f"[{code}]")
    assert "Traceback" not in done.stderr
    # Nothing was unpacked.
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert not (tmp_path.parent / "x").exists()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
