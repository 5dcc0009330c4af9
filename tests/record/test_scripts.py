"""Scripts with ranges, profilers, processes and exits of their own: with us as without us.

Each script is a small file in ``scripts/``. All run in forks of one process, once without us and
once recorded.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.record.runs import chosen_names, run_jobs, run_plain

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("*.py") if path.stem != "tiny")
OPTIONS = {"steps": 2, "warmup": 2, "timing_steps": 2, "keep_going": True, "timeout_s": 60.0}
# What a shell makes of it: 130 is an interrupt, by a signal or as a status.
INTERRUPTED = {-2: 130}


@dataclass(frozen=True)
class Ran:
    """How a script ended, its seconds in all and behind the report, its output, and its record."""

    status: int
    took_s: float
    behind_s: float
    out: str
    err: str
    account: dict[str, Any]


def run_scripts(names: Sequence[str], folder: Path) -> dict[str, list[Ran]]:
    """Each script without us, and then recorded."""
    jobs = [_job(name, number, folder) for name in names for number in (0, 1)]
    ran: dict[str, list[Ran]] = {}
    for job, ended in zip(jobs, run_jobs(jobs, folder, 3), strict=True):
        ran.setdefault(Path(job["script"]).stem, []).append(_read(job, *ended))
    return ran


def _job(name: str, number: int, folder: Path) -> dict[str, Any]:
    place = folder / f"{name}-{number}"
    options = {**OPTIONS, "output": str(place)} if number else None
    return {
        "script": str(HERE / "scripts" / f"{name}.py"),
        "out": f"{place}.out",
        "err": f"{place}.err",
        "options": options,
        "report": f"{place}.report",
    }


def _read(job: dict[str, Any], status: int, took_s: float, behind_s: float | None) -> Ran:
    account = Path(job["out"]).with_suffix("") / "run-rank0.json"
    return Ran(
        INTERRUPTED.get(status, status),
        took_s,
        behind_s or 0.0,
        Path(job["out"]).read_text(),
        Path(job["err"]).read_text(),
        json.loads(account.read_text()) if account.exists() else {},
    )


# What these print depends on how a process began: they are started as a person starts them.
ALONE = {"other_output", "replaced_library", "replaced_steps", "uncaught"}
# Its own profiler runs all the time, or its steps are made elsewhere or not at all.
WITHOUT_TRACE = {"errors_in_threads", "no_optimizer", "profiler_of_autograd", "runs_itself"}


def run_alone(name: str, folder: Path) -> tuple[tuple[int, str], tuple[int, str]]:
    """Status and output of a script as Python runs it, and as the command does."""
    command = ["-m", "recompute_scan", "run", "-o", str(folder / name)]
    for option in ("steps", "warmup", "timing_steps"):
        command += [f"--{option.replace('_', '-')}", str(OPTIONS[option])]
    ends = []
    for start in ([], [*command, "--keep-going"]):
        done = run_plain(HERE / "scripts", *start, f"{name}.py")
        ends.append((done.returncode, done.stdout))
    return ends[0], ends[1]


# One of each kind: ranges, profilers, threads, processes, exits, exceptions.
SAMPLE = {
    "errors_in_threads",
    "fork_trains",
    "interrupted",
    "leaves_at_once",
    "no_optimizer",
    "own_checkpoints",
    "profiler_during",
    "range_around_step",
    "range_of_operators",
}
every_script = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow)
        for name in SCRIPTS
        if name not in ALONE
    ],
)


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Ran]]:
    """The sample, and what else was chosen, each without us and recorded."""
    chosen = chosen_names(request) | SAMPLE
    names = [name for name in SCRIPTS if name in chosen and name not in ALONE]
    return run_scripts(names, tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize(
    "name",
    [
        *("other_output", "replaced_library", "uncaught"),
        pytest.param("replaced_steps", marks=pytest.mark.slow),
    ],
)
def test_a_script_started_by_itself_does_the_same(name: str, tmp_path: Path) -> None:
    plain, recorded = run_alone(name, tmp_path)
    assert recorded[0] == plain[0]
    assert recorded[1].startswith(plain[1])  # the report comes after it
    assert "Verdict: " in recorded[1]
    assert "E702" not in recorded[1]


@every_script
def test_a_script_does_what_it_does_without_us(name: str, ran: dict[str, list[Ran]]) -> None:
    plain, recorded = ran[name]
    assert recorded.out == plain.out
    assert recorded.status == plain.status, recorded.err
    assert recorded.account.get("bug") is None
    assert recorded.behind_s < 5 + plain.took_s  # a busy machine takes as long for both
    assert plain.out, "a script that says nothing shows nothing"


def test_most_scripts_are_recorded_to_the_end(ran: dict[str, list[Ran]]) -> None:
    without = {name for name, (_, recorded) in ran.items() if not recorded.account.get("trace")}
    assert without <= WITHOUT_TRACE


def test_ranges_that_cannot_be_ended_keep_the_second_profiler_away(
    ran: dict[str, list[Ran]],
) -> None:
    account = ran["range_of_operators"][1].account
    assert account["stacks"] is None
    assert account["message"] is None  # no step more is wanted
    assert "step by operator" in " ".join(account["warnings"])
    assert ran["range_around_step"][1].account["stacks"] is not None


def test_fifty_backward_passes_without_a_step_are_told_while_it_trains(
    ran: dict[str, list[Ran]],
) -> None:
    assert "50 backward passes, and no step" in ran["no_optimizer"][1].err
