"""What `doctor` says agrees with what can be done here."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

from recompute_scan import installation
from recompute_scan.installation import Installed, look


def by_purpose(lines: list[Installed]) -> dict[str, Installed]:
    return {line.purpose: line for line in lines}


@pytest.mark.slow
def test_what_is_here_is_found() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recompute_scan", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    heading, _, *lines = done.stdout.splitlines()
    assert heading.startswith(f"recompute-scan {version('recompute-scan')}, Python ")
    assert all(len(line) <= 80 for line in lines)
    said = {" ".join(line.split()) for line in lines}
    assert f"ok run torch {version('torch')}" in said
    assert any(line.startswith("ok run -- LAUNCHER start-up hook") for line in said)
    assert not any(line.startswith("problem") for line in lines)


def test_without_torch_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = installation._version_of
    monkeypatch.setattr(
        installation, "_version_of", lambda name: None if name == "torch" else found(name)
    )
    line = by_purpose(look())["run"]
    assert line == Installed("missing", "run", 'no torch: pip install "recompute-scan[torch]"')


def test_a_broken_torch_is_a_problem_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = by_purpose(look())["run"]
    assert line.state == "problem"
    assert line.said == "importing torch fails: ImportError: libcudart.so.12: no such file"


@pytest.mark.parametrize(
    ("activities", "devices", "built_for", "state"),
    [
        (["CPU", "CUDA"], ["NVIDIA H100"], "12.8", "ok"),
        (["CPU"], ["NVIDIA H100"], "12.8", "problem"),
        (["CPU"], [], "12.8", "missing"),
        (["CPU"], [], None, "missing"),
    ],
)
def test_a_gpu_that_cannot_be_recorded_is_a_problem(
    activities: list[str], devices: list[str], built_for: str | None, state: str
) -> None:
    found = {"activities": activities, "devices": devices, "built_for": built_for}
    assert installation._device(found).state == state


def test_a_missing_hook_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert installation._launchers().state == "problem"
    (tmp_path / "recompute_scan.pth").write_text('import os; "RECOMPUTE_SCAN_JOIN" in os.environ')
    assert installation._launchers().state == "ok"
