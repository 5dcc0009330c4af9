"""A run that fails replaces nothing that one that came through has left, nor does a plan."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.cli.run import launcher_in
from recompute_scan.files import append, write_whole
from recompute_scan.record.options import beside, prepare, take_place
from tests.record.runs import LAYERS, QUICK, Ran, forked_tool, plain_environment

TRAINS = (
    LAYERS
    + """
layer = Layer()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(8):
    checkpoint(layer, torch.ones(2, 8), use_reentrant=False).sum().backward()
    optimizer.step()
    if "raise" in sys.argv:
        raise KeyboardInterrupt if "interrupt" in sys.argv else ValueError("later")
"""
)


def put(folder: Path, **result: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run-rank0.json").touch()  # it is of a run
    (folder / "result.json").write_text(json.dumps({"crash": None, "plan": None, **result}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*.*")}


def test_a_folder_without_a_result_is_recorded_into(tmp_path: Path) -> None:
    new, crashed = tmp_path / "new", put(tmp_path / "crashed", crash={"rank": 0})
    assert beside(new) == (new, None)
    assert beside(crashed) == (crashed, None)
    assert beside(crashed, plans=True) == (crashed, None)


def test_where_there_is_a_result_the_next_run_goes_beside_it(tmp_path: Path) -> None:
    out = put(tmp_path / "out")
    failed = tmp_path / "out-failed"
    assert beside(out) == (failed, out)
    put(failed, crash={"rank": 0})  # of a run that failed before: the next may have it
    assert beside(out) == (failed, out)
    put(failed)  # somebody's own
    assert beside(out) == (tmp_path / "out-failed-2", out)
    (link := tmp_path / "link").symlink_to(out)
    assert beside(link) == (link / "failed", link)  # its neighbour is inside


@pytest.mark.parametrize("text", ["", "[]", "{", '{"crash": 1', "\xff"])
def test_a_result_that_cannot_be_read_is_not_replaced_either(tmp_path: Path, text: str) -> None:
    out = put(tmp_path / "out")
    (out / "result.json").write_bytes(text.encode("latin-1"))
    assert beside(out)[1] == out


def test_a_plan_replaces_plans_only(tmp_path: Path) -> None:
    out, plan = put(tmp_path / "out"), tmp_path / "out-plan"
    assert beside(out, plans=True) == (plan, None)
    put(plan, plan={"memory": 1})
    assert beside(out, plans=True) == (tmp_path / "out-plan-failed", plan)
    assert beside(plan, plans=True) == (tmp_path / "out-plan-failed", plan)


def test_a_new_result_replaces_all_that_the_earlier_run_has_left(tmp_path: Path) -> None:
    out, new = put(tmp_path / "out"), put(tmp_path / "out-failed", verdict="new")
    for name in ("trace-rank0.json.gz", "trace-rank7.json.gz", "run-rank7.json", "mine.txt"):
        (out / name).write_text("old")
    (out / "guard-rank0.json").write_text("kept")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "theirs").touch()
    (out / "verify").symlink_to(outside)
    (new / "trace-rank0.json.gz").write_text("new")
    (new / "plan").mkdir()
    take_place(new, out)
    assert not new.exists()
    assert (out / "trace-rank0.json.gz").read_text() == "new"
    assert json.loads((out / "result.json").read_text())["verdict"] == "new"
    names = {one.name for one in out.iterdir()} - {"run-rank0.json"}
    assert names == {"trace-rank0.json.gz", "result.json", "plan", "mine.txt", "guard-rank0.json"}
    assert (outside / "theirs").exists()


def test_what_a_failed_run_left_does_not_pass_for_this_ones(tmp_path: Path) -> None:
    out = put(tmp_path / "out", crash={"rank": 0})
    (out / "report.html").touch()
    prepare(out)
    assert list(out.iterdir()) == []


def test_nothing_is_written_or_appended_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("target.json", "target.part"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "target.json", b"ours")
    assert (tmp_path / "target.json").read_text() == "ours"
    (tmp_path / "log").symlink_to(victim)
    with pytest.raises(OSError, match="link"):
        append(tmp_path / "log")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "sh", "mylauncher"])
def test_a_folder_of_its_name_does_not_hide_a_launcher(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / name
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    whole = ["run", "--", name, "train.py"]
    assert launcher_in(whole, name, ["train.py"]) == str(program)
    assert launcher_in(["run", name, "train.py"], name, ["train.py"]) is None
    (tmp_path / "folder").mkdir()
    assert launcher_in(["run", "--", "folder"], "folder", []) is None


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def run(folder: Path, *words: str, stdout: Any = subprocess.PIPE) -> Ran:
    options = ["--steps", "1", "--warmup", "1", "--timing-steps", "1", "-o", "out"]
    return subprocess.run(
        [sys.executable, "-m", "recompute_scan", "run", *options, *words],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )


@pytest.mark.parametrize(
    "name", ["l\nf", *(pytest.param(one, marks=pytest.mark.slow) for one in ("\u2028", "\udcff"))]
)
def test_a_folder_of_any_name_gets_its_trace(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / name).mkdir()
    out = ("-o", tmp_path / name)
    assert forked_tool(tmp_path, "run", *QUICK, *out, "train.py").returncode == 0
    assert "trace-rank0.json.gz" in names_in(tmp_path / name)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize(("word", "status"), [("raise", 1), ("", 2)])
def test_a_report_that_has_no_room_leaves_a_failed_script_its_status(
    word: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    with Path("/dev/full").open("wb") as full:
        done = run(tmp_path, "train.py", word, stdout=full)
    assert done.returncode == status
    assert "No space left" in done.stderr
    assert (tmp_path / "out" / "result.json").is_file()


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_earlier_result_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("run-rank0", "so-far-rank0", ".trace-rank0.json.gz", ".stacks-rank0.json.gz"):
        (tmp_path / "out" / f"{name}.part").symlink_to(victim)
    assert run(tmp_path, "train.py").returncode == 0
    assert victim.read_text() == "mine"
    before = contents(tmp_path / "out")
    assert {"result.json", "report.html", "trace-rank0.json.gz"} <= before.keys()
    for words, status in (
        (("train.py", "raise"), 1),
        (("train.py", "raise", "interrupt"), 130),
        (("-m", "there_is_no_such_module"), 2),  # leaves all as it was
    ):
        done = run(tmp_path, *words)
        assert done.returncode == status, done.stderr
        assert contents(tmp_path / "out") == before
        assert ("keeps the result of an earlier run" in done.stderr) == (status != 2)
        assert names_in(tmp_path) == ["out", "out-failed", "train.py", "victim"]
    assert run(tmp_path, "train.py").returncode == 0
    assert contents(tmp_path / "out")["trace-rank0.json.gz"] != before["trace-rank0.json.gz"]
    # What the interrupted run answered stays too.
    assert names_in(tmp_path) == ["out", "out-failed", "train.py", "victim"]
