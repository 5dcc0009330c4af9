"""What others wrote is opened in one place; nothing waits for a pipe, and nobody ends the rest."""

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from recompute_scan import files
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.cli import main
from recompute_scan.errors import InputError
from recompute_scan.result import from_json, to_json

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "recompute_scan"
TRACE = ROOT / "traces" / "plain_twice" / "trace-rank0.json.gz"
Output = pytest.CaptureFixture[str]

# Functions and methods that open a file by its name, and the modules where they may: why.
OPENING = {
    *("open", "read_text", "read_bytes", "fromfile", "getline", "getlines", "ZipFile", "connect"),
    *("memmap", "loadtxt", "genfromtxt", "fdopen", "open_code", "input_file", "FileIO"),
}
ELSEWHERE = {
    "files.py": "the one place",
    "trace/streams.py": "looked at before, or at an address",
    "trace/database.py": "`sources.load` has opened it before",
    "analysis/tracks.py": "writes its own file",
    "bundle/pack.py": "the archive that it has just written",
    "integrations/follower.py": "the same, in a folder of its own",
    "bundle/names.py": "a text of this package",
    "cli/show.py": "texts of this package, and of the documentation in a checkout",
    "report/templating.py": "templates of this package",
    "cli/__init__.py": "/dev/null",
    "cli/output.py": "the browser",
    "events.py": "the file that a person named for it, which may be a pipe; it never waits",
    "trackers.py": "what this process has written",
    "record/attribution.py": "cells of a notebook, which are in no file",
    "record/shutdown.py": "standard output, and a pipe of its own",
    "record/watchdog.py": "lines as a traceback has them",
    "terminal.py": "standard output or error again, where a script has closed the stream",
}


def test_nothing_else_opens_files() -> None:
    used = set()
    for file in sorted(SOURCES.rglob("*.py")):
        name = file.relative_to(SOURCES).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            called = getattr(function, "attr", getattr(function, "id", ""))
            if called in OPENING:
                known = [one for one in ELSEWHERE if name == one or name.startswith(one)]
                assert known, f"{name}:{node.lineno} opens a file: use recompute_scan.files"
                used.update(known)
    assert used == set(ELSEWHERE)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def terminal(path: Path) -> None:
    path.symlink_to("/dev/tty" if Path("/dev/tty").exists() else "/dev/ptmx")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        before = Path.cwd()
        os.chdir(path.parent)  # its path must be short
        try:
            one.bind(path.name)
        finally:
            os.chdir(before)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def linked_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("beside-" + path.name[:8]))
    path.symlink_to("beside-" + path.name[:8])


ODD = [fifo, device, terminal, unix_socket, loop, folder, linked_fifo]
# A file that one of the commands reads, the command, and how it ends; HERE is the folder.
DOORS = {
    "baseline.json": (["check", "HERE/own", "--baseline", "HERE/baseline.json"], 3),
    "b.json": (["check", "HERE/own"], 3),  # as pyproject.toml names it
    "trace.json": (["analyze", "HERE/trace.json"], 3),
    "own/trace-rank1.json": (["analyze", "HERE/own"], 0),
    "own/run-rank0.json": (["analyze", "HERE/own"], 0),
    "own/stacks-rank0.json.gz": (["analyze", "HERE/own"], 0),
    "own/compiled-rank0.log": (["analyze", "HERE/own"], 0),
    "own/where-rank0.txt": (["analyze", "HERE/own"], 0),
    "own/flight-rank0.json": (["analyze", "HERE/own"], 0),
    "own/memory.pickle": (["analyze", "HERE/own"], 0),
    "own/result.json": (["compare", "HERE/own", "HERE/own"], 0),
    "result.json": (["report", "HERE/result.json"], 3),
    "crash.log": (["explain", "HERE/crash.log"], 3),
    "script/requirements.txt": (["lint", "HERE/script"], 0),
    "script/pyproject.toml": (["lint", "HERE/script"], 0),
    "script/other.py": (["lint", "HERE/script"], 0),
    "script/config.yaml": (["lint", "HERE/script"], 0),
    "script/start.sh": (["lint", "HERE/script"], 0),
}


@pytest.fixture
def here(inside: Path) -> Path:
    for name in ("own", "script"):
        (inside / name).mkdir()
    shutil.copy(TRACE, inside / "own")
    (inside / "script" / "train.py").write_text("x = 1\n")
    return inside


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", DOORS)
def test_nothing_waits_for_what_is_no_file(
    name: str, make: Callable[[Path], None], here: Path, capsys: Output
) -> None:
    make(here / name)
    if name == "b.json":
        text = '[tool.recompute-scan.check]\nbaseline = "b.json"\n'
        (here / "pyproject.toml").write_text(text)
    arguments, expected = DOORS[name]
    status = main([one.replace("HERE", str(here)) for one in arguments])
    printed = capsys.readouterr()
    assert "[E7" not in printed.err
    allowed = {expected}
    if expected == 3:
        allowed = {2, 3}
    if make in (loop, linked_fifo, device, terminal) and name.startswith(("own/", "script/")):
        allowed |= {3, 4}  # a link out of the folder is refused
    assert status in allowed, printed.err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", ODD)
def test_a_run_waits_for_nothing_that_its_script_was_given(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    from recompute_scan.record.attribution import (  # noqa: PLC0415
        Made,
        given_at,
        statement_at,
    )
    from recompute_scan.record.policies import spelled_at  # noqa: PLC0415

    for name in ("train.yaml", "train.py"):
        make(tmp_path / name)
    arguments = (f"--config={tmp_path / 'train.yaml'}", str(tmp_path / "train.yaml"))
    assert given_at(Made("train.py:1", object, arguments, {}), {"checkpoint"}, (), None) is None
    assert statement_at(tmp_path / "train.py", 1) is None
    assert spelled_at(tmp_path / "train.py") == {}


@pytest.mark.timeout(60)
def test_a_project_file_that_is_a_pipe_is_passed_over(here: Path) -> None:
    os.mkfifo(here / "pyproject.toml")
    assert main(["check", str(here / "own"), "--fail-on", "none"]) == 0
    assert main(["lint", str(here / "script")]) == 0


def test_the_largest_is_said(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(InputError, match="larger than 1,000 bytes"):
        files.read(file, 1000)
    with pytest.raises(OSError, match="larger"):
        files.content(file)


def test_what_a_shell_hands_over_is_read() -> None:
    command = f"{sys.executable} -m recompute_scan explain <(echo 'ValueError: no')"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = subprocess.run(
        [sys.executable, "-m", "recompute_scan", "explain", "/dev/stdin"],
        input="ValueError: no\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, done.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "tool = 1\n",
        "tool = []\n",
        'tool = "recompute-scan"\n',
        "[tool]\nrecompute-scan = 1\n",
        "[[tool.recompute-scan]]\n",
        "[tool.recompute-scan]\ncheck = 1\n",
        *(
            f"[tool.recompute-scan.check]\n{key} = {value}\n"
            for key, values in {
                "max-recompute": ("nan", "inf", "-1", "true", "9" * 400, "9" * 5000),
                "max-cost": ('"nan"', "[nan]", '["RS001=nan"]', '["RS999=5"]'),
                "fail-on": ('["RS999"]',),
            }.items()
            for value in values
        ),
        "[tool.recompute-scan.check]\nbaseline = 1\n",
        '[tool.recompute-scan.check]\nbaseline = "a\\u0000b"\n',
        '[tool.recompute-scan.check]\nbaseline = "' + "a" * 5000 + '"\n',
        f"recompute-scan = {'[' * 5000}{']' * 5000}\n",
        f"x.recompute-scan = {'{a=' * 3000}1{'}' * 3000}\n",
        f"[tool.recompute-scan.{'.'.join('a' * 3000)}]\n",
        "recompute-scan = \n",
        "# recompute-scan\n\x00",
        "# recompute-scan\n" + "# x\n" * 300_000,
        "[tool.recompute-scan.lint]\nselect = [nan]\n",
    ],
    ids=range(27),
)
def test_settings_of_any_shape_are_answered(text: str, here: Path, capsys: Output) -> None:
    (here / "pyproject.toml").write_text(text, encoding="utf-8", newline="")
    for command in (["check", str(here / "own")], ["lint", str(here / "script")]):
        status = main(command)
        error = capsys.readouterr().err
        assert "[E7" not in error
        assert status in (0, 1, 2, 3)
        if any(word in text for word in ("nan", "inf", "RS999")):
            assert status == 2 or command[0] not in text


@pytest.mark.parametrize(
    "option",
    [
        ["check", "--max-recompute"],
        ["check", "--max-cost"],
        ["analyze", "--peak-tflops"],
        ["analyze", "--memory-gib"],
        ["plan", "--step-time"],
        ["plan", "--timeout"],
        ["plan", "--memory"],
        ["run", "--timeout"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN", "1e999", "-nan", "infinity"])
def test_numbers_are_finite(option: list[str], value: str, here: Path, capsys: Output) -> None:
    what = here / "own" if option[0] in ("check", "analyze") else here / "script" / "train.py"
    assert main([option[0], f"{option[1]}={value}", str(what)]) == 2
    assert "[E7" not in capsys.readouterr().err


@pytest.mark.parametrize("before", ["./", ".//", "././", "./a/", "a/./", "a//.//b/", "a../", ""])
def test_members_may_begin_with_the_folder_itself(before: str, here: Path) -> None:
    archive = here / "run.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for name in ("trace-rank0.json.gz", "run-rank0.json"):
            packed.writestr(before + name, (TRACE.parent / name).read_bytes())
    result = from_json(to_json(analyse([archive])))
    assert result.verdict == "doubled"
    assert result.environment  # the run record was found beside it


@pytest.mark.parametrize("stacks", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "a" * 999])
def test_a_run_record_names_files_of_its_folder_only(stacks: str, here: Path) -> None:
    info = json.loads((TRACE.parent / "run-rank0.json").read_bytes())
    (here / "own" / "run-rank0.json").write_text(json.dumps(info | {"stacks": stacks}))
    assert main(["check", str(here / "own")]) == (1 if stacks[:2] == "aa" else 3)


@pytest.mark.parametrize("name", ["result.json", "base.json", "main", "r.txt", "-.json"])
def test_a_result_is_one_by_any_name(name: str, here: Path, capsys: Output) -> None:
    assert main(["analyze", str(TRACE), "--format", "json", "--output", str(here / name)]) == 0
    other = shutil.copy(here / name, here / f"other-{name}")
    assert main(["compare", str(here / name), str(other), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["check", str(here / name)]) == 1
