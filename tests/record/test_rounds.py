"""How often `--verify` runs the script: until the times answer."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from recompute_scan.record import verify
from recompute_scan.record.measure import _sampled
from recompute_scan.record.options import RunOptions
from recompute_scan.result import Result
from recompute_scan.result.run_record import write_run_info
from recompute_scan.verification import Trial
from tests.present import present
from tests.report import sample_results
from tests.test_verification import REMOVED, STEADY, scaled, trial, with_fix

UNCHANGED, FIX, WITHOUT = "unchanged", "with-the-fix", "without-checkpointing"
PLAN, SWITCHING = "with-the-plan", "switching-the-fix"
FOR_GRADIENTS = [("first-step-unchanged", 1), ("first-step-without-checkpointing", 1)]
# As a run times them that switches a fix on and off which saves a fifth.
SAVES_A_FIFTH = (100.0, 80.0, 82.0, 101.0)


def ran(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fixed: tuple[float, ...],
    *,
    switching: Trial,
    without_checkpointing: bool = False,
    plan: Trial | None = None,
    removed: bool = True,
) -> tuple[list[tuple[str, int]], Result]:
    """The runs that were started behind those for the gradients, where each run with the fix takes
    the next of these times, and each that switches it on and off, or has the plan, gives the same
    trial.
    """
    started: list[tuple[str, int]] = []

    def run(name: str, number: int, *_: object) -> Trial:
        started.append((name, number))
        if name == SWITCHING:
            return switching
        if name == PLAN:
            assert plan is not None
            return plan
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
    return started[2:], result


def doubled() -> Result:
    """A result whose first finding names the checkpoint to take out."""
    result = sample_results.doubled()
    first, *others = result.findings
    assert first.fix is not None
    first = replace(first, fix=replace(first.fix, removes=REMOVED[0]))
    return replace(result, findings=(first, *others))


def test_two_rounds_are_enough_where_the_times_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, result = ran(monkeypatch, tmp_path, (0.8, 0.8), switching=trial(status=1))
    assert started == [(FIX, 1), (FIX, 2), (UNCHANGED, 2)]
    assert (present(result.verified).outcome, present(result.verified).before.runs) == ("helps", 2)


@pytest.mark.parametrize("status", [0, 1])
def test_the_plan_takes_part_in_both_rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    """With a fix and without one; what fails is not tried again."""
    plan = with_fix(*scaled(0.7)) if status == 0 else trial(status=1, message="out of memory")
    for removed in (True, False):
        started, result = ran(
            monkeypatch, tmp_path, (0.8, 0.8), switching=trial(status=1), plan=plan, removed=removed
        )
        fix = [FIX] if removed else []
        first, second = [*fix, PLAN], [*([] if status else [PLAN]), *fix, UNCHANGED]
        assert started == [(way, 1) for way in first] + [(way, 2) for way in second]
        section = present(result.verified)
        assert section.outcome == ("helps" if removed else "not-tried")
        assert section.with_plan is not None
        assert section.with_plan.arm is not None
        if status:
            assert section.with_plan.arm.status == "out-of-memory"
        else:
            assert section.with_plan.modules == tuple(f"model.layers.{at}" for at in range(3, 8))
            assert (section.with_plan.arm.runs, section.with_plan.arm.step_ms) == (2, 70.0)
            assert section.with_plan.losses.status == "equal"


def test_the_fix_is_switched_while_the_times_leave_it_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four pairs a run, of which eight are wanted."""
    switching = with_fix(*SAVES_A_FIFTH, *SAVES_A_FIFTH)
    times = (0.95, 0.7)
    started, result = ran(
        monkeypatch, tmp_path, times, switching=switching, without_checkpointing=True
    )
    assert started[:5] == [(FIX, 1), (WITHOUT, 1), (WITHOUT, 2), (FIX, 2), (UNCHANGED, 2)]
    assert started[5:] == [(SWITCHING, 1), (SWITCHING, 2)]
    section = present(result.verified)
    assert (section.outcome, section.pairs, section.switching_runs) == ("helps", 8, 2)
    assert section.saving_pct == pytest.approx(100 * (1 - (80 / 100 + 82 / 101) / 2))
    assert section.before.runs == 2


def test_slower_with_fewer_recomputes_is_measured_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a machine that was busy whenever the fix ran."""
    switching = with_fix(*SAVES_A_FIFTH, *SAVES_A_FIFTH)
    started, result = ran(monkeypatch, tmp_path, (2.5, 3.0), switching=switching)
    assert started[3:] == [(SWITCHING, 1), (SWITCHING, 2)]
    assert (present(result.verified).outcome, present(result.verified).pairs) == ("helps", 8)


@pytest.mark.parametrize("runs", [1, 6])
def test_slower_is_said_where_side_by_side_or_every_round_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: int
) -> None:
    slower = with_fix(*(100.0, 140.0, 141.0, 101.0) * 2) if runs == 1 else with_fix(100.0)
    _, result = ran(monkeypatch, tmp_path, (1.4,) * 6, switching=slower)
    assert present(result.verified).outcome == "slower"
    assert (present(result.verified).pairs > 0) == (runs == 1)


def test_switching_four_times_is_the_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    switching = with_fix(100.0, 50.0, 150.0, 100.0, 100.0, 60.0, 120.0, 100.0)
    started, result = ran(monkeypatch, tmp_path, (0.95, 0.7), switching=switching)
    assert started[3:] == [(SWITCHING, number) for number in (1, 2, 3, 4)]
    assert (present(result.verified).outcome, present(result.verified).pairs) == ("unclear", 16)


@pytest.mark.parametrize("switching", [trial(status=1), with_fix(100.0)])
def test_more_rounds_follow_where_it_cannot_be_switched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switching: Trial
) -> None:
    times = (0.95, 0.7, 0.8, 0.82, 0.8, 0.8)
    started, result = ran(
        monkeypatch, tmp_path, times, switching=switching, without_checkpointing=True
    )
    more = [run for run in started[5:] if run[0] != SWITCHING]
    assert len(started) - 5 - len(more) == 1
    assert more[:4] == [(UNCHANGED, 3), (FIX, 3), (FIX, 4), (UNCHANGED, 4)]
    assert present(result.verified).outcome == "helps"
    assert present(present(result.verified).without_checkpointing).runs == 2


def test_six_rounds_are_the_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = (0.5, 2.0, 0.6, 1.7, 0.5, 1.9)
    started, result = ran(monkeypatch, tmp_path, times, switching=trial(status=1))
    assert started[-1] == (UNCHANGED, 6)
    assert len(started) == 12
    assert present(result.verified).outcome == "unclear"


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
