"""What several runs of one script, unchanged and with the fix, say together.

Everything here is arithmetic on the accounts that the runs left; starting them is the work of
:mod:`recompute_scan.record.verify`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Literal

from recompute_scan.headline import headline
from recompute_scan.result import Arm, Checkpoint, Losses, Outcome, Result, Verified
from recompute_scan.run_info import Measurements, RunInfo

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory", re.I
)
_KILLED = 137  # by SIGKILL, which is how Linux takes back memory
_ONE_SIDE = 0.025
# Student's t for 98.5 % at 1, 2, … degrees of freedom, and for very many. So much at each look,
# because the question is asked anew after every round until it is answered: which makes 93 % of
# two to six rounds, the rule for many rounds included (`tests/test_verification.py` draws it).
_T = (42.43, 8.073, 5.047, 4.088, 3.634)
_NORMAL = 2.432
# The smallest and the largest of so many values hold the median of all with more than 96 %.
_MANY = 6
# Of the width of an interval of 95 % to a standard error.
_ERRORS_95 = 2 * 1.96
# Of the step: a saving that this bounds on both sides is none worth a change.
_SMALL = 0.05


@dataclass(frozen=True)
class Trial:
    """One run of the script.

    Attributes:
        accounts: What its ranks left, rank 0 first; empty where none did.
        exit_status: Of the script, or of what started it.
        result: What its trace showed, where it recorded one.
    """

    accounts: tuple[RunInfo, ...]
    exit_status: int = 0
    result: Result | None = None

    @property
    def measured(self) -> list[Measurements]:
        """What each rank measured."""
        return [info.measured for info in self.accounts if info.measured is not None]

    @property
    def timed_ms(self) -> tuple[float, ...]:
        """Rank 0's timed steps. Ranks wait for one another in every step."""
        return self.accounts[0].timed_steps_ms if self.accounts else ()


def verified(
    result: Result,
    removed: tuple[Checkpoint, ...],
    before: Sequence[Trial],
    after: Sequence[Trial],
    without: Sequence[Trial],
) -> Result:
    """The result with its measured section, and the headline that follows from it.

    Args:
        result: What the first run, unchanged, showed.
        removed: The checkpoints that the fix takes out.
        before: Runs of the unchanged script, at least one; the first gave ``result``.
        after: Runs with the fix; none where there was no fix to try.
        without: Runs without any checkpoint; none where that was not asked for.
    """
    arm_before = _arm(before)
    arm_after = _arm(after) if after else None
    losses = _losses(before, after)
    section = Verified(
        outcome="not-tried",
        removed=removed,
        before_step_ms=arm_before.step_ms,
        after_step_ms=arm_after.step_ms if arm_after else None,
        saving_ms=None,
        saving_low_ms=None,
        saving_high_ms=None,
        saving_pct=None,
        more_time_pct=None,
        before_peak_bytes=_peak(arm_before),
        after_peak_bytes=_peak(arm_after),
        losses_equal={"equal": True, "different": False}.get(losses.status),
        losses=losses,
        before=arm_before,
        after=arm_after,
        without_checkpointing=_arm(without) if without else None,
    )
    section = _with_saving(section, before, after)
    section = replace(section, outcome=_outcome(section, after))
    if section.outcome == "not-applied":
        section = _without_figures(section)
    result = replace(result, verified=section)
    return replace(result, headline=headline(result))


def median_interval(times: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value of the 95 % interval of the median of these times.

    By order statistics, whatever the distribution: for n times the r-th smallest and the r-th
    largest hold the median with probability 1 - 2 P(Binomial(n, 1/2) < r) (David and Nagaraja,
    *Order Statistics*, section 7.1). Below six times even their range holds it less surely.
    """
    ordered = sorted(times)
    number, rank, below = len(ordered), 1, 0.5 ** len(ordered)
    while rank < number // 2:
        below += math.comb(number, rank) * 0.5**number
        if below > _ONE_SIDE:
            break
        rank += 1
    return ordered[rank - 1], ordered[number - rank]


def _arm(trials: Sequence[Trial]) -> Arm:
    failed = next((trial for trial in trials if not _came_through(trial)), None)
    if failed is not None:
        status: Literal["out-of-memory", "failed"] = (
            "out-of-memory" if _ran_out(failed) else "failed"
        )
        return Arm(status, _message(failed))
    steps = [time for trial in trials for time in trial.timed_ms]
    intervals = [median_interval(trial.timed_ms) for trial in trials]
    seen = next((trial.result for trial in trials if trial.result is not None), None)
    return Arm(
        status="measured",
        runs=len(trials),
        timed_steps=len(steps),
        step_ms=median(steps),
        step_low_ms=min(low for low, _ in intervals),
        step_high_ms=max(high for _, high in intervals),
        peak_allocated_bytes=_most(trials, lambda measured: measured.peak_allocated_bytes),
        peak_reserved_bytes=_most(trials, lambda measured: measured.peak_reserved_bytes),
        peak_rss_bytes=_most(trials, lambda measured: measured.peak_rss_bytes),
        verdict=seen.verdict if seen else None,
        recompute_per_backward=seen.recompute_per_backward if seen else None,
    )


def _came_through(trial: Trial) -> bool:
    return trial.exit_status == 0 and bool(trial.timed_ms) and bool(trial.measured)


def _ran_out(trial: Trial) -> bool:
    said = [info.message for info in trial.accounts if info.message]
    return trial.exit_status == _KILLED or any(_OUT_OF_MEMORY.search(text) for text in said)


def _message(trial: Trial) -> str:
    said = [info.message for info in trial.accounts if info.message]
    return said[0] if said else f"It ended with exit status {trial.exit_status}."


def _most(trials: Sequence[Trial], value: Callable[[Measurements], int | None]) -> int | None:
    found = [value(measured) for trial in trials for measured in trial.measured]
    return max((number for number in found if number is not None), default=None)


def _peak(arm: Arm | None) -> int | None:
    if arm is None:
        return None
    return arm.peak_rss_bytes if arm.peak_allocated_bytes is None else arm.peak_allocated_bytes


def _with_saving(section: Verified, before: Sequence[Trial], after: Sequence[Trial]) -> Verified:
    step, then = section.before_step_ms, section.after_step_ms
    if step is None or then is None:
        return section
    low, high = ratio_interval(
        [(b.timed_ms, a.timed_ms) for b, a in zip(before, after, strict=False)]
    )
    saved = step - then
    return replace(
        section,
        saving_ms=saved,
        saving_low_ms=min(saved, step * (1 - high)),
        saving_high_ms=max(saved, step * (1 - low)),
        saving_pct=100 * saved / step,
        more_time_pct=100 * saved / then,
    )


def ratio_interval(
    rounds: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[float, float]:
    """What the second times are of the first, at least and at most, by the medians of rounds.

    A machine that is slower in one round than in another slows both sides of it, so each round
    gives one ratio; how far these lie apart says how sure their mean is (Student's t, of their
    logarithms), and never surer than the times within the runs allow. From six rounds on the range
    of the ratios is given where it is the narrower one: it holds their median whatever the
    distribution, where a single round that a burst of other work fell into makes Student's t wide.

    Args:
        rounds: Step times of one run unchanged and of one with the fix, at least one pair; all
            above 0.
    """
    ratios = [math.log(median(after) / median(before)) for before, after in rounds]
    within = math.sqrt(
        sum(_error(before) ** 2 + _error(after) ** 2 for before, after in rounds) / len(rounds)
    )
    half = _NORMAL * within
    if len(ratios) > 1:
        half = max(half, _T[min(len(ratios) - 2, len(_T) - 1)] * stdev(ratios))
    half /= math.sqrt(len(ratios))
    if len(ratios) >= _MANY and max(ratios) - min(ratios) < 2 * half:
        return math.exp(min(ratios)), math.exp(max(ratios))
    return math.exp(fmean(ratios) - half), math.exp(fmean(ratios) + half)


def _error(times: Sequence[float]) -> float:
    """Standard error of the logarithm of the median of these times."""
    low, high = median_interval(times)
    return math.log(high / low) / _ERRORS_95


def _outcome(section: Verified, after: Sequence[Trial]) -> Outcome:
    if section.after is None:
        return "not-tried"
    if section.after.status != "measured":
        return "failed"
    if not any(measured.bypassed_calls for trial in after for measured in trial.measured):
        return "not-applied"
    if section.losses_equal is False:
        return "losses-differ"
    low, high, now = section.saving_low_ms, section.saving_high_ms, section.before_step_ms
    if low is None or high is None or now is None:
        return "failed"
    if low > 0:
        return "helps"
    if high < 0:
        return "slower"
    return "no-gain" if max(-low, high) <= _SMALL * now else "unclear"


def _without_figures(section: Verified) -> Verified:
    """What was run was the unchanged script once more: no figure says anything of the fix."""
    return replace(
        section,
        after=None,
        after_step_ms=None,
        after_peak_bytes=None,
        saving_ms=None,
        saving_low_ms=None,
        saving_high_ms=None,
        saving_pct=None,
        more_time_pct=None,
        losses_equal=None,
        losses=Losses("not-seen"),
    )


def _losses(before: Sequence[Trial], after: Sequence[Trial]) -> Losses:
    """Every run beside the first unchanged one, each rank beside the same rank."""
    measured = [item for trial in before for item in trial.measured]
    seeded = all(item.seeded for item in measured) if measured else None
    # Some runs go on further than others, to be recorded.
    runs = [item for trial in (*before, *after) for item in trial.measured]
    compared = min((len(item.losses) for item in runs), default=0) if after else 0
    if not compared:
        return Losses("not-seen", seeded_by_script=seeded)
    repeat = _largest_difference(before[0], before[1:], compared)
    changed = _largest_difference(before[0], after, compared)
    if repeat != 0.0:
        return Losses("not-repeatable", compared, changed, repeat, seeded)
    status: Literal["equal", "different"] = "equal" if changed == 0.0 else "different"
    return Losses(status, compared, changed, repeat, seeded)


def _largest_difference(one: Trial, others: Sequence[Trial], number: int) -> float | None:
    """By how much the first ``number`` losses differ at most, over all ranks.

    0.0 only where all bits are equal; ``None`` where there is no other run, or a loss that
    differs is no number.
    """
    differences = [
        abs(float.fromhex(mine) - float.fromhex(its)) if mine != its else 0.0
        for other in others
        for first, second in zip(one.measured, other.measured, strict=False)
        for mine, its in zip(first.losses[:number], second.losses[:number], strict=True)
    ]
    if not all(map(math.isfinite, differences)):
        return None
    return max(differences, default=None)
