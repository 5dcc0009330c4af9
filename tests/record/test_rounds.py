"""How often `--verify` runs the script: until the times answer, six rounds at most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recompute_scan.record import verify as module
from recompute_scan.record.runner import RunOptions
from recompute_scan.result import Result
from recompute_scan.run_info import write_run_info
from recompute_scan.verification import Trial
from tests.report import sample_results
from tests.test_verification import REMOVED, STEADY, scaled, trial, with_fix

UNCHANGED, FIX, WITHOUT = "unchanged", "with-the-fix", "without-checkpointing"


def ran(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fixed: tuple[float, ...],
    *,
    without_checkpointing: bool = False,
) -> tuple[list[tuple[str, int]], Result]:
    """The runs that were started, where each run with the fix takes the next of these times."""
    started: list[tuple[str, int]] = []

    def run(name: str, number: int, *_: object) -> Trial:
        started.append((name, number))
        return with_fix(*scaled(fixed[number - 1])) if name == FIX else trial(*STEADY)

    monkeypatch.setattr(module, "_run", run)
    write_run_info(tmp_path, trial(*STEADY).accounts[0])
    options = RunOptions("train.py", is_module=False, args=(), output=tmp_path, measure=True)
    result = module.verify(doubled(), options, None, without_checkpointing=without_checkpointing)
    return started, result


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
    started, result = ran(monkeypatch, tmp_path, (0.8, 0.8))
    assert started == [(FIX, 1), (FIX, 2), (UNCHANGED, 2)]
    assert result.verified is not None
    assert (result.verified.outcome, result.verified.before.runs) == ("helps", 2)


def test_more_rounds_follow_while_the_times_leave_it_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = (0.95, 0.7, 0.8, 0.82, 0.8, 0.8)
    started, result = ran(monkeypatch, tmp_path, times, without_checkpointing=True)
    assert started[:5] == [(FIX, 1), (WITHOUT, 1), (WITHOUT, 2), (FIX, 2), (UNCHANGED, 2)]
    assert started[5:7] == [(UNCHANGED, 3), (FIX, 3)]
    assert started[7:9] == [(FIX, 4), (UNCHANGED, 4)]
    assert result.verified is not None
    assert result.verified.outcome == "helps"
    assert result.verified.without_checkpointing is not None
    assert result.verified.without_checkpointing.runs == 2


def test_six_rounds_are_the_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started, result = ran(monkeypatch, tmp_path, (0.5, 2.0, 0.6, 1.7, 0.5, 1.9))
    assert started[-1] == (UNCHANGED, 6)
    assert len(started) == 11
    assert result.verified is not None
    assert result.verified.outcome == "unclear"
