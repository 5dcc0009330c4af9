"""Each run has a folder of its own; the script's folder stands for the newest that succeeded."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan import files as runs
from recompute_scan.cli import main
from recompute_scan.errors import UsageError
from recompute_scan.record.options import beside, came_to_an_end
from recompute_scan.result import from_json
from tests.record.runs import QUICK, plain_environment, tool
from tests.record.test_kept_results import TRAINS, contents, names_in, put


def test_runs_of_a_day_are_numbered_and_the_newest_that_came_through_counts(tmp_path: Path) -> None:
    script = tmp_path / "recompute-scan-out" / "train"
    first, second, third = (runs.new_run(script) for _ in range(3))
    assert [one.name[-2:] for one in (first, second, third)] == ["-1", "-2", "-3"]
    assert (script.parent / ".gitignore").read_text() == "*\n"
    assert runs.newest_run(str(script)) == str(script)  # none has ended
    put(first, crash={"rank": 0})
    came_to_an_end(first, well=False)
    assert runs.newest_run(str(script)) == str(first)
    put(second)
    came_to_an_end(second, well=True)
    came_to_an_end(third, well=False)
    assert runs.newest_run(str(script)) == str(second)
    assert (script / "latest").readlink() == Path(second.name)
    runs.remove(second)
    assert runs.newest_run(str(script)) == str(third)
    assert runs.all_runs(script.parent) == [first, third]


@pytest.mark.parametrize(
    "other",
    [
        {"TORCHELASTIC_RUN_ID": "5af5529d-acb0-4da1"},
        {"MASTER_PORT": "29501"},
        {"SLURM_JOB_ID": "17"},
        {"TORCHELASTIC_RESTART_COUNT": "10", "GROUP_WORLD_SIZE": "1"},
        {"TORCHELASTIC_RUN_ID": "../../etc"},
    ],
    ids=str,
)
def test_each_job_of_a_launcher_has_a_folder_of_its_own(
    other: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a job share it; a job that restarts on several nodes counts there unalike."""
    script = tmp_path / "recompute-scan-out" / "train"
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = runs.new_run(script, several=True)
    for restarts, rank in ("01", "10"):
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("RANK", rank)
        assert runs.new_run(script, several=True) == first
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    second = runs.new_run(script, several=True)
    assert second != first
    for one in (first, second):
        assert runs.is_run(one)
        assert one.parent == script


@pytest.mark.slow
def test_ranks_that_torchrun_starts_leave_one_result_for_each_job(tmp_path: Path) -> None:
    """torchrun starts `run` as each rank: a second job keeps the first one's result."""
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "optimizer = torch.optim.SGD((weight := torch.ones(4, requires_grad=True),))\n"
        "for _ in range(9):\n    weight.sum().backward()\n    optimizer.step()\n"
    )
    (tmp_path / "train.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "recompute_scan", "run", *QUICK, "train.py"]
    for number in (1, 2):
        done = subprocess.run(command, cwd=tmp_path, env=plain_environment(), capture_output=True)
        assert done.returncode == 0, done.stderr
        made = list(tmp_path.glob("recompute-scan-out/train/launched-*"))
        assert len(made) == number
        assert all((one / f"run-rank{rank}.json").exists() for one in made for rank in range(2))
        assert all((one / "result.json").exists() for one in made)


def test_a_file_says_it_where_links_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(1, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refused)
    run = runs.new_run(tmp_path / "recompute-scan-out" / "train")
    runs.make_newest(run)
    assert (run.parent / "latest").read_text() == run.name
    assert runs.newest_run(str(run.parent)) == str(run)


@pytest.mark.parametrize("name", ["..", "../../elsewhere", "/etc", "own", "2026-11-26-9"])
def test_no_folder_stands_for_what_is_not_a_run_in_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "2026-11-26-9").symlink_to("own")
    (tmp_path / "latest").symlink_to(name)
    assert runs.newest_run(str(tmp_path)) == str(tmp_path)


def test_what_no_run_has_left_is_not_recorded_over(tmp_path: Path) -> None:
    (tmp_path / "trace-rank0.json.gz").write_text("mine")
    with pytest.raises(UsageError, match="no recording of `run` has left it"):
        beside(tmp_path)
    assert contents(tmp_path) == {"trace-rank0.json.gz": b"mine"}


@pytest.mark.slow
def test_each_run_stays_and_old_ones_can_be_removed(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inside / "train.py").write_text(TRAINS)
    for word, status in (("", 0), ("", 0), ("raise", 1), ("--no-such-option", 2)):
        words = [*QUICK, "train.py", word] if status < 2 else [word, "train.py"]
        done = tool(inside, "run", *words)
        assert done.returncode == status, done.stderr
    out = inside / "recompute-scan-out" / "train"
    first, second, third, latest = names_in(out)
    assert (latest, runs.newest_run(str(out))) == ("latest", str(out / second))
    for command in (["analyze", "-q"], ["check"], ["report"], ["compare", str(out / first)]):
        assert main([*command, "recompute-scan-out/train"]) == 0
    capsys.readouterr()
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1:] for line in listed] == [["full"], ["full", "latest"], ["failed"]]
    assert main(["runs", "--remove"]) == 2
    assert main(["runs", "--remove", f"recompute-scan-out/train/{first}"]) == 0
    assert names_in(out) == [second, third, "latest"]


def test_options_come_from_the_project_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line goes first, then the environment, then the project."""
    project = tmp_path / "pyproject.toml"
    project.write_text("[tool.recompute-scan.run]\nsteps = 0\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", "train.py"]) == 2
    assert "[E204]" in capsys.readouterr().err
    monkeypatch.setenv("RECOMPUTE_SCAN_RUN_STEPS", "many")
    assert main(["run", "train.py"]) == 2
    wrong = "'many' is not a valid integer"
    assert f"RECOMPUTE_SCAN_RUN_STEPS: {wrong}" in capsys.readouterr().err
    monkeypatch.delenv("RECOMPUTE_SCAN_RUN_STEPS")
    project.write_text('[tool.recompute-scan.run]\nsteps = "many"\n')
    assert main(["run", "train.py"]) == 2
    assert f"steps of [tool.recompute-scan.run]: {wrong}" in capsys.readouterr().err
    assert main(["run", "--steps", "-1", "train.py"]) == 2
    assert "[E204]" in capsys.readouterr().err
    project.write_text("[tool.recompute-scan.run]\nstepz = 3\n")
    assert main(["run", "train.py"]) == 2
    assert "'stepz' in [tool.recompute-scan.run]" in capsys.readouterr().err
    assert not list(tmp_path.glob("recompute-scan-out/train/*"))


@pytest.mark.slow
def test_json_has_standard_output_for_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"print('mine')\n{TRAINS}")
    done = tool(tmp_path, "run", *QUICK, "--format", "json", "train.py")
    assert from_json(done.stdout).verdict == "full"
    assert "mine" in done.stderr


def test_a_trace_comes_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("traces/plain_twice/trace-rank0.json.gz").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        assert main(["analyze", "-q", "-"]) == 0
    assert capsys.readouterr().out.startswith("Verdict: doubled. Every block")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["anlyze", "x"], "Did you mean 'analyze'?"),
        (["run", "--stepz", "3", "x.py"], "Did you mean '--steps'?"),
        (["explain", "RS01"], "There is neither a finding nor a file named RS01"),
        (["explain", "RS013"], "did you mean RS010 or RS011 or RS012?"),
        (["check", "x", "--fail-on", "RS013"], "did you mean RS010 or RS011 or RS012? doubled,"),
    ],
)
def test_what_may_be_meant_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_RECOMPUTE_SCAN_COMPLETE={shell}_complete" in capsys.readouterr().out
