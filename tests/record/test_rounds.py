"""How often `--verify` runs the script: until the times answer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from recompute_scan.record import verify
from recompute_scan.record.measure import _sampled
from recompute_scan.record.options import RunOptions
from recompute_scan.result import Result, Verified
from recompute_scan.result.run_record import write_run_info
from recompute_scan.verification import Trial
from tests.present import present
from tests.report import sample_results
from tests.test_verification import REMOVED, STEADY, scaled, trial, with_fix

UNCHANGED, FIX, WITHOUT = "unchanged", "with-the-fix", "without-checkpointing"
PLAN, SWITCHING = "with-the-plan", "switching-the-fix"
Ran = Callable[..., tuple[list[tuple[str, int]], Verified]]
FOR_GRADIENTS = [("first-step-unchanged", 1), ("first-step-without-checkpointing", 1)]
# As a run times them that switches a fix on and off which saves a fifth.
SAVES_A_FIFTH = (100.0, 80.0, 82.0, 101.0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    """Gives the runs that were started behind those for the gradients, and what they say: each run
    with the fix takes the next of these times, and each that switches it on and off, or has the
    plan, gives the same trial.
    """

    def ran(
        *fixed: float,
        switching: Trial,
        without_checkpointing: bool = False,
        plan: Trial | None = None,
        removed: bool = True,
    ) -> tuple[list[tuple[str, int]], Verified]:
        started: list[tuple[str, int]] = []

        def run(name: str, number: int, *_: object) -> Trial:
            started.append((name, number))
            if name == SWITCHING:
                return switching
            if name == PLAN:
                return present(plan)
            return with_fix(*scaled(fixed[number - 1])) if name == FIX else trial(*STEADY)

        monkeypatch.setattr(verify, "_run", run)
        write_run_info(tmp_path, trial(*STEADY).records[0])
        options = RunOptions("train.py", is_module=False, args=(), output=tmp_path, measure=True)
        recorded = doubled() if removed else replace(sample_results.doubled(), findings=())
        if plan is not None:
            found = replace(sample_results.FINDING, code="RS301", fix=None)
            recorded = replace(recorded, findings=(*recorded.findings, found))
        result = verify.verify(recorded, options, None, without_checkpointing=without_checkpointing)
        assert started[:2] == FOR_GRADIENTS
        return started[2:], present(result.verified)

    return ran


def doubled() -> Result:
    """A result whose first finding names the checkpoint to take out."""
    result = sample_results.doubled()
    first, *others = result.findings
    assert first.fix is not None
    first = replace(first, fix=replace(first.fix, removes=REMOVED[0]))
    return replace(result, findings=(first, *others))


def test_two_rounds_are_enough_where_the_times_agree(ran: Ran) -> None:
    started, section = ran(0.8, 0.8, switching=trial(status=1))
    assert started == [(FIX, 1), (FIX, 2), (UNCHANGED, 2)]
    assert (section.outcome, section.before.runs) == ("helps", 2)


@pytest.mark.parametrize("status", [0, 1])
def test_the_plan_takes_part_in_both_rounds(ran: Ran, status: int) -> None:
    """With a fix and without one; what fails is not tried again."""
    plan = with_fix(*scaled(0.7)) if status == 0 else trial(status=1, message="out of memory")
    for removed in (True, False):
        started, section = ran(0.8, 0.8, switching=trial(status=1), plan=plan, removed=removed)
        fix = [FIX] if removed else []
        first, second = [*fix, PLAN], [*([] if status else [PLAN]), *fix, UNCHANGED]
        assert started == [(way, 1) for way in first] + [(way, 2) for way in second]
        assert section.outcome == ("helps" if removed else "not-tried")
        assert section.with_plan is not None
        assert section.with_plan.arm is not None
        if status:
            assert section.with_plan.arm.status == "out-of-memory"
        else:
            assert section.with_plan.modules == tuple(f"model.layers.{at}" for at in range(3, 8))
            assert (section.with_plan.arm.runs, section.with_plan.arm.step_ms) == (2, 70.0)
            assert section.with_plan.losses.status == "equal"


def test_the_fix_is_switched_while_the_times_leave_it_open(ran: Ran) -> None:
    """Four pairs a run, of which eight are wanted."""
    switching = with_fix(*SAVES_A_FIFTH, *SAVES_A_FIFTH)
    times = (0.95, 0.7)
    started, section = ran(*times, switching=switching, without_checkpointing=True)
    assert started[:5] == [(FIX, 1), (WITHOUT, 1), (WITHOUT, 2), (FIX, 2), (UNCHANGED, 2)]
    assert started[5:] == [(SWITCHING, 1), (SWITCHING, 2)]
    assert (section.outcome, section.pairs, section.switching_runs) == ("helps", 8, 2)
    assert section.saving_pct == pytest.approx(100 * (1 - (80 / 100 + 82 / 101) / 2))
    assert section.before.runs == 2


def test_slower_with_fewer_recomputes_is_measured_side_by_side(ran: Ran) -> None:
    """As on a machine that was busy whenever the fix ran."""
    switching = with_fix(*SAVES_A_FIFTH, *SAVES_A_FIFTH)
    started, section = ran(2.5, 3.0, switching=switching)
    assert started[3:] == [(SWITCHING, 1), (SWITCHING, 2)]
    assert (section.outcome, section.pairs) == ("helps", 8)


@pytest.mark.parametrize("runs", [1, 6])
def test_slower_is_said_where_side_by_side_or_every_round_says_so(ran: Ran, runs: int) -> None:
    slower = with_fix(*(100.0, 140.0, 141.0, 101.0) * 2) if runs == 1 else with_fix(100.0)
    _, section = ran(*[1.4] * 6, switching=slower)
    assert section.outcome == "slower"
    assert (section.pairs > 0) == (runs == 1)


def test_switching_four_times_is_the_most(ran: Ran) -> None:
    switching = with_fix(100.0, 50.0, 150.0, 100.0, 100.0, 60.0, 120.0, 100.0)
    started, section = ran(0.95, 0.7, switching=switching)
    assert started[3:] == [(SWITCHING, number) for number in (1, 2, 3, 4)]
    assert (section.outcome, section.pairs) == ("unclear", 16)


@pytest.mark.parametrize("switching", [trial(status=1), with_fix(100.0)])
def test_more_rounds_follow_where_it_cannot_be_switched(ran: Ran, switching: Trial) -> None:
    times = (0.95, 0.7, 0.8, 0.82, 0.8, 0.8)
    started, section = ran(*times, switching=switching, without_checkpointing=True)
    more = [run for run in started[5:] if run[0] != SWITCHING]
    assert len(started) - 5 - len(more) == 1
    assert more[:4] == [(UNCHANGED, 3), (FIX, 3), (FIX, 4), (UNCHANGED, 4)]
    assert section.outcome == "helps"
    assert present(section.without_checkpointing).runs == 2


def test_six_rounds_are_the_most(ran: Ran) -> None:
    times = (0.5, 2.0, 0.6, 1.7, 0.5, 1.9)
    started, section = ran(*times, switching=trial(status=1))
    assert started[-1] == (UNCHANGED, 6)
    assert len(started) == 12
    assert section.outcome == "unclear"


def test_models_of_one_class_have_a_name_each() -> None:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    pair = [Twin(), Twin()]
    for twin in pair:
        twin.inner(torch.ones(2)).sum().backward()
    names = [one.name for one in _sampled() if "Twin.inner.weight" in one.name]
    assert names == ["Twin.inner.weight", "Twin.inner.weight (2)"]
