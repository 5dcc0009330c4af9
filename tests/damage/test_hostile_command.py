"""Files made to do harm, given to the command itself: refused soon, in one line, status 3."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .make_corpus import FOLDER
from .test_corpus import REFUSED


@pytest.mark.parametrize(
    "name",
    [
        "gzip_bomb.json.gz",
        "zip_with_parent_name.zip",
        "array_100000_deep.json",
        "args_100000_deep.json",
    ],
)
def test_refused_in_a_second_with_one_line_and_status_3(tmp_path: Path, name: str) -> None:
    file = Path(shutil.copy(FOLDER / name, tmp_path))
    before = _cpu_seconds()
    command = [sys.executable, "-m", "recompute_scan", "analyze", "--format", "json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    # Of the processor's time: others may use it too. Start-up included.
    assert _cpu_seconds() - before < 1.5
    lines = [line for line in done.stderr.splitlines() if line.startswith("recompute-scan: ")]
    assert len(lines) == 1
    assert lines[0].endswith(f"[{REFUSED[name]}]")
    assert "Traceback" not in done.stderr
    # Nothing was unpacked.
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert not (tmp_path.parent / "trace.json").exists()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
