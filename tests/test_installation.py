"""What `doctor` says agrees with what can be done here."""

import re
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

from recompute_scan.cli import show as installation
from recompute_scan.cli.show import Installed, look
from recompute_scan.errors import how_to_add
from tests.record.runs import tool


def by_purpose(lines: list[Installed]) -> dict[str, Installed]:
    return {line.purpose: line for line in lines}


@pytest.mark.slow
def test_what_is_here_is_found() -> None:
    done = tool(Path.cwd(), "doctor")
    assert done.returncode == 0, done.stderr
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
    assert line == Installed("missing", "run", f"no torch; {how_to_add('torch')}")


def test_a_broken_torch_is_a_problem_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = by_purpose(look())["run"]
    assert line.state == "problem"
    assert line.found == "importing torch fails: ImportError: libcudart.so.12: no such file"


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


def test_nothing_tells_anyone_to_install_a_name_that_nobody_owns() -> None:
    """No package index has this package: whoever took its name there would run what they like."""
    named = re.compile(
        r"""pipx? install(?: +[^\s"'`]+)*? +["']?recompute[-_]scan(?=["'\[=\s`]|$)|"""
        r"""default: recompute-scan$""",
        re.MULTILINE,
    )
    root = Path(__file__).parents[1]
    folders = ("src", "docs", "notebooks", "examples", "benchmarks")
    files = [root / "README.md", root / "action.yml", root / "Makefile"]
    for folder in folders:
        files += (
            one
            for one in (root / folder).rglob("*")
            if one.suffix in (".py", ".md", ".ipynb", ".html", ".yml", ".txt")
        )
    told = {str(one.relative_to(root)): named.findall(one.read_text("utf-8")) for one in files}
    assert {name for name, found in told.items() if found} == set()
    assert named.search('run: pip install -q "recompute-scan[torch]" -r requirements.txt')
    assert named.search("pip install recompute-scan")
    assert not named.search('in the checkout of recompute-scan: pip install ".[torch]"')
