"""Files: links are not followed out of a folder, output is whole or not there, nothing is lost."""

import os
import shutil
from pathlib import Path

import pytest

from recompute_scan import files
from recompute_scan.cli import main
from recompute_scan.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "plain_twice" / "trace-rank0.json.gz"
# `analyze --html` writes it beside the page.
PATCH = "fix.patch"
Output = pytest.CaptureFixture[str]

WRITING = [
    ["analyze", str(TRACE), "--html", "TARGET"],
    ["analyze", str(TRACE), "--output", "TARGET"],
    ["report", "RESULT", "--html", "TARGET"],
    ["bundle", str(TRACE), "-o", "TARGET"],
    ["check", str(TRACE), "--output", "TARGET"],
    ["check", str(TRACE), "--write-baseline", "TARGET"],
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("result") / "result.json"
    assert main(["analyze", str(TRACE), "--format", "json", "--output", str(file)]) == 0
    return file


def filled(arguments: list[str], target: Path, result: Path) -> list[str]:
    return [a.replace("TARGET", str(target)).replace("RESULT", str(result)) for a in arguments]


def test_what_is_no_file_stays(tmp_path: Path, result: Path, capsys: Output) -> None:
    target = tmp_path / "pipe"
    os.mkfifo(target)
    assert main([*filled(WRITING[0], target, result), "--force"]) == 2
    assert "[E208]" in capsys.readouterr().err
    assert target.is_fifo()


@pytest.mark.parametrize("arguments", WRITING, ids=lambda a: f"{a[0]} {a[2]}")
def test_what_is_there_stays_unless_forced(
    arguments: list[str], tmp_path: Path, result: Path, capsys: Output
) -> None:
    target = tmp_path / "mine.zip"
    target.write_text("mine")
    command = filled(arguments, target, result)
    assert main(command) == 2
    assert "[E209]" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main([*command, "--force"]) in (0, 1)
    assert target.read_bytes() != b"mine"
    assert set(tmp_path.iterdir()) - {tmp_path / PATCH} == {target}


@pytest.mark.parametrize(
    "outputs",
    [
        *("--output x --html ./x", "--html x --perfetto here/x", "--html x --perfetto x.part"),
        *("--output x --events x", "--output fix.patch --html x", "--output x --write-baseline x"),
    ],
)
def test_two_outputs_in_one_file_are_refused(outputs: str, inside: Path, capsys: Output) -> None:
    (inside / "here").symlink_to(inside)
    command = "check" if "baseline" in outputs else "analyze"
    assert main([command, str(TRACE), *outputs.split(), "--force"]) == 2
    assert "goes there too" in capsys.readouterr().err
    assert "events" in outputs or {one.name for one in inside.iterdir()} == {"here"}


@pytest.mark.parametrize("arguments", WRITING, ids=lambda a: f"{a[0]} {a[2]}")
def test_nothing_is_written_through_a_link(
    arguments: list[str], tmp_path: Path, result: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    target = folder / "out.zip"
    target.symlink_to(precious)
    (folder / "out.zip.part").symlink_to(precious)
    assert main([*filled(arguments, target, result), "--force"]) in (0, 1)
    assert precious.read_text() == "precious"
    assert not target.is_symlink()
    assert set(folder.iterdir()) - {folder / PATCH} == {target}


@pytest.mark.parametrize("name", ["recompute-scan-out", "recompute-scan-out/train"])
@pytest.mark.parametrize("command", [["run"], ["run", "--guard"], ["plan"]], ids=" ".join)
def test_a_link_in_place_of_the_usual_folder_is_refused(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "report.html").write_text("precious")
    here = tmp_path / "here"
    (here / name).parent.mkdir(parents=True)
    (here / "train.py").write_text("open('ran', 'w')\n")
    link = here / (name + "-plan" * (command == ["plan"] and name.endswith("train")))
    link.symlink_to(precious)
    monkeypatch.chdir(here)
    assert main([*command, "train.py"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert [one.name for one in precious.iterdir()] == ["report.html"]
    assert not (here / "ran").exists()


def test_a_link_to_nowhere_is_something_too(tmp_path: Path) -> None:
    target = tmp_path / "out.md"
    target.symlink_to(tmp_path / "nowhere")
    assert main(["analyze", str(TRACE), "--output", str(target)]) == 2
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, os.strerror(28))], ids=type)
def test_output_is_whole_or_not_there(error: BaseException, tmp_path: Path) -> None:
    told = UsageError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(told), files.written(tmp_path / "out") as partial:
        partial.write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trace-rank0.json.gz", "run-rank0.json"])
def test_a_link_out_of_a_folder_is_refused(name: str, tmp_path: Path, capsys: Output) -> None:
    folder = tmp_path / "stranger"
    folder.mkdir()
    for each in ("trace-rank0.json.gz", "run-rank0.json"):
        shutil.copy(ROOT / "traces" / "plain_twice" / each, folder)
    private = tmp_path / "private.json"
    private.write_text('{"password": "hunter2"}')
    (folder / name).unlink()
    (folder / name).symlink_to(private)
    assert main(["analyze", str(folder)]) == 3
    printed = capsys.readouterr()
    assert "[E317]" in printed.err
    assert "hunter2" not in printed.err + printed.out


def test_a_link_within_a_folder_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    (folder / "data").mkdir(parents=True)
    shutil.copy(TRACE, folder / "data" / "blob")
    (folder / "trace.json.gz").symlink_to(folder / "data" / "blob")
    assert main(["analyze", str(folder)]) == 0
