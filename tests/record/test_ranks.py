"""`--ranks`: the chosen ranks record, all count, and all stop after the same step."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner

from recompute_scan.cli import cli
from recompute_scan.errors import UsageError
from recompute_scan.record.launch import LastStep, Membership, RankFacts, rank_facts
from recompute_scan.record.steps import Plan, StepTimer, chosen
from recompute_scan.result.run_record import RunInfo, read_run_info
from tests.record.runs import LAYERS, tool, write_script

# Every step needs every rank. Rank 1 has a profiler itself on, for the first seven steps.
FOUR = (
    LAYERS
    + """\
import atexit, os
import torch.distributed as dist
from torch.profiler import profile

class Block(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(Block(), Block())
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
own = profile() if rank == 1 else None
for step in range(1000):
    if own and step == 1:
        own.start()
    if own and step == 7:
        own.stop()
    checkpoint(model, torch.randn(4, 8, requires_grad=True), use_reentrant=True).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    with open(f"steps{rank}", "w") as file:
        file.write(str(step + 1))
    optimizer.step()
"""
)


@pytest.mark.parametrize(
    ("text", "world_size", "ranks"),
    [
        ("0,last", 1, {0}),
        ("0,last", 512, {0, 511}),
        ("all", 3, {0, 1, 2}),
        ("2", 4, {2}),
        ("0, 2-9", 4, {0, 2, 3}),
        ("7", 4, set()),
        ("5-6,last", 4, {3}),
        ("0-999999999", 2, {0, 1}),
    ],
)
def test_a_list_of_ranks(text: str, world_size: int, ranks: set[int]) -> None:
    assert chosen(text, world_size) == ranks


@pytest.mark.parametrize("text", ["", "some", "-1", "0,,1", "1-", "0;1", "²"])
def test_what_names_no_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="E224"):
        chosen(text, 4)


@pytest.mark.parametrize(
    ("rank", "size", "expected"),
    [
        ("1", "4", (1, 4)),
        ("4", "4", (0, 1)),
        ("x", "4", (0, 4)),
        ("-1", "", (0, 1)),
        ("²", "nan", (0, 1)),
        ("9" * 5000, "9" * 5000, (0, 1)),
    ],
)
def test_variables_of_a_launcher_of_any_shape(
    rank: str, size: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert rank_facts() == RankFacts(*expected)


class Store:
    """As torch's, for ranks that take turns in one process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def add(self, key: str, amount: int) -> int:
        self.kept[key] = str(int(self.kept.get(key, 0)) + amount)
        return int(self.kept[key])

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


@pytest.fixture
def ends() -> list[LastStep]:
    store = Store()
    found = [LastStep(10), LastStep(10)]
    for end in found:
        end.store = store
    return found


def test_without_a_word_all_stop_as_planned(ends: list[LastStep]) -> None:
    assert [end.passed(9) for end in ends] == [False, False]
    assert [end.passed(10) for end in ends] == [True, True]


def test_one_that_waits_keeps_all_going_and_all_stop_together(ends: list[LastStep]) -> None:
    slow, other = ends
    assert slow.wait(5)
    assert [end.passed(11) for end in (other, slow)] == [False, False]
    slow.settle(11, 6)
    assert [end.passed(16) for end in (other, slow)] == [False, False]
    assert [end.passed(17) for end in (other, slow)] == [True, True]


def test_nothing_is_asked_that_others_may_not_see_in_time(ends: list[LastStep]) -> None:
    slow, other = ends
    assert not slow.wait(8)
    assert (slow.passed(10), other.passed(10)) == (True, True)


def test_the_end_is_never_set_nearer_than_others_can_see_it(ends: list[LastStep]) -> None:
    slow = ends[0]
    slow.wait(7)
    slow.settle(12, 1)
    assert [end.passed(14) for end in ends] == [False, False]
    assert [end.passed(15) for end in ends] == [True, True]


class Timed:
    """Steps of equal length on every rank, or of very different ones."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    @property
    def steps(self) -> int:
        return len(self.times)

    def milliseconds(self, *, wait: bool = True) -> tuple[float, ...]:
        return tuple(self.times)


@pytest.mark.parametrize(("spread", "timed"), [(0.001, 4), (0.5, 10)])
def test_all_ranks_end_timing_and_stop_after_the_same_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spread: float, timed: int
) -> None:
    store = Store()
    monkeypatch.setattr("recompute_scan.record.launch._store_of_group", lambda: store)
    plan, members = Plan(3, 10, 5, fewest=(1, 3)), []
    for rank in range(2):
        monkeypatch.setattr(
            "recompute_scan.record.launch.rank_facts", lambda rank=rank: RankFacts(rank, 2)
        )
        members.append(Membership(plan, "all"))
        members[-1].settle(tmp_path, 3)
    # The first rank decides, whatever the times of the other.
    timers = [Timed([]), Timed([])]
    over: list[int] = []
    for made in range(4, 30):
        for rank, (member, timer) in enumerate(zip(members, timers, strict=True)):
            timer.times.append(100 * (1 + (spread if rank == 0 else 0.4) * (made % 3)))
            if len(over) <= rank and member.is_timed(made, cast("StepTimer", timer)):
                over.append(made - 3)
                member.last_step.settle(made, plan.after_timing)
            assert member.last_step.passed(made) == (made >= 3 + timed + plan.after_timing)
    assert over == [timed, timed]


@dataclass(frozen=True)
class Run:
    folder: Path
    done: subprocess.CompletedProcess[str]

    def account(self, rank: int) -> RunInfo:
        return read_run_info(self.folder / "out" / f"run-rank{rank}.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("four")
    write_script(folder, FOUR)
    options = ["--steps", "2", "--warmup", "2", "--timing-steps", "2", "--ranks", "1,last"]
    done = tool(folder, "run", "--nproc-per-node", "4", "-o", "out", *options, "train.py")
    assert done.returncode == 0, done.stderr
    return Run(folder, done)


@pytest.mark.slow
def test_the_chosen_ranks_record_and_the_others_count(run: Run) -> None:
    result = json.loads((run.folder / "out" / "result.json").read_text())
    assert (result["verdict"], [rank["rank"] for rank in result["ranks"]]) == ("doubled", [1, 3])
    assert run.done.stdout.count("Verdict: doubled") == 1
    for rank in range(4):
        account = run.account(rank)
        recorded = rank in (1, 3)
        assert (account.rank, account.world_size, account.status) == (rank, 4, "complete")
        assert (account.chosen, account.trace is not None) == (recorded, recorded)
        assert len(account.timed_steps_ms) == 2
    traces = sorted(path.name for path in (run.folder / "out").glob("*.gz"))
    assert traces == [
        f"{kind}-rank{rank}.json.gz" for kind in ("stacks", "trace") for rank in (1, 3)
    ]


@pytest.mark.slow
def test_all_stop_after_the_same_step_though_one_had_to_wait(run: Run) -> None:
    made = [int((run.folder / f"steps{rank}").read_text()) for rank in range(4)]
    # Without rank 1's profiler: 2 + 2 + 1 + 2 + 1. Its seventh step was the last that it profiled.
    assert len(set(made)) == 1
    assert made[0] > 8
    assert "profiler itself" in " ".join(run.account(1).warnings)
    assert not any(run.account(rank).warnings for rank in (0, 2, 3))


def test_a_choice_of_ranks_that_are_not_there() -> None:
    command = ["run", "--nproc-per-node", "2", "--ranks", "2,5-6", __file__]
    done = CliRunner().invoke(cli, command, obj=command)
    assert isinstance(done.exception, UsageError)
    assert done.exception.code == "E224"
