"""Several runs of one script, unchanged and with the fix: times, memory, losses and gradients.

Everything here is arithmetic on the run records that the runs left;
:mod:`recompute_scan.record.verify` starts the runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.analysis.headline import headline
from recompute_scan.findings.registry import settle
from recompute_scan.intervals import FEWEST_PAIRS, median_interval, pair_interval, ratio_interval
from recompute_scan.result import (
    Arm,
    Checkpoint,
    GradientDistance,
    Gradients,
    Losses,
    Outcome,
    Region,
    Result,
    Verified,
    WithPlan,
)
from recompute_scan.result.fidelity import ComparedGradients, Sampled
from recompute_scan.result.run_record import Measurements, RunInfo, step_has_fix

# Most runs for this; regions that are left then stay unknown.
_MOST_RUNS = 12
_WORST = 10
# A gradient sums over many operators, and each rounds.
_ROUNDINGS = 30
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory", re.I
)
_KILLED = 137  # by SIGKILL, which is how Linux takes back memory


class Trial(Struct, frozen=True):
    """One run of the script.

    Attributes:
        records: What its ranks left, rank 0 first; empty where none did.
        exit_status: The exit status of the script, or of its launcher.
        result: What its trace showed, where it recorded one.
        gradients: Of its first step, on rank 0; empty where they were not seen.
    """

    records: tuple[RunInfo, ...]
    exit_status: int = 0
    result: Result | None = None
    gradients: tuple[Sampled, ...] = ()

    @property
    def measured(self) -> list[Measurements]:
        """The measurements of each rank."""
        return [info.measured for info in self.records if info.measured is not None]

    @property
    def timed_ms(self) -> tuple[float, ...]:
        """Rank 0's timed steps. Ranks wait for one another in every step."""
        return self.records[0].timed_steps_ms if self.records else ()

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Of a run that switched the fix on and off: neighbouring steps, unchanged and with it."""
        times = self.timed_ms
        return [
            (times[at + 1], times[at]) if step_has_fix(at) else (times[at], times[at + 1])
            for at in range(0, len(times) - 1, 2)
        ]

    @property
    def came_through(self) -> bool:
        """Whether the script ended well and steps were timed."""
        return self.exit_status == 0 and bool(self.timed_ms) and bool(self.measured)


def ran_out(trial: Trial) -> bool:
    """Whether it ran out of memory, by its records and exit status."""
    said = [info.message for info in trial.records if info.message]
    return trial.exit_status == _KILLED or any(_OUT_OF_MEMORY.search(text) for text in said)


def message(trial: Trial) -> str:
    """How it ended, in one sentence."""
    said = [info.message for info in trial.records if info.message]
    return said[0] if said else f"It ended with exit status {trial.exit_status}."


def most(trials: Sequence[Trial], name: str) -> int | None:
    """The largest of this measurement over all ranks of these runs; ``None`` if none is known."""
    found = [getattr(measured, name) for trial in trials for measured in trial.measured]
    return max((number for number in found if number is not None), default=None)


class _Distances(Struct, frozen=True):
    """How far gradients and buffers after the first step differ from another run.

    Attributes:
        apart: Each that both runs have, and its distance.
        repeat: The largest distance between two runs of the script as it is.
    """

    apart: list[tuple[Sampled, float]]
    repeat: float

    @property
    def beyond(self) -> tuple[str, ...]:
        """Those further off than rounding and the script's own differences explain."""
        own = _FAR * self.repeat
        return tuple(one.name for one, d in self.apart if d > max(_ROUNDINGS * one.rounding, own))

    @property
    def status(self) -> Literal["not-seen", "equal", "rounding", "different", "not-repeatable"]:
        """Their joint answer."""
        if not self.apart:
            return "not-seen"
        if not any(distance for _, distance in self.apart):
            return "equal"
        if self.beyond:
            return "different"
        return "rounding" if self.repeat == 0.0 else "not-repeatable"


def _distances(
    mine: Sequence[Sampled], others: Sequence[Sampled], again: Sequence[Sampled]
) -> _Distances:
    theirs, twice = ({(one.name, one.is_buffer): one for one in run} for run in (others, again))
    keyed = [(one, (one.name, one.is_buffer)) for one in mine]
    both = [(one, key) for one, key in keyed if key in theirs]
    return _Distances(
        [(one, one.distance(theirs[key])) for one, key in both],
        max((one.distance(twice[key]) for one, key in both if key in twice), default=0.0),
    )


def compare_gradients(
    mine: Sequence[Sampled], others: Sequence[Sampled], again: Sequence[Sampled] = ()
) -> Gradients:
    """How far gradients and buffers after the first step differ from another run; ``again`` is a
    second run of the script as it is.
    """
    found = _distances(mine, others, again)
    worst = sorted(found.apart, key=lambda pair: -pair[1])[:_WORST]
    return Gradients(
        found.status,
        compared=len(found.apart),
        worst=tuple(
            GradientDistance(one.name, one.is_buffer, d if math.isfinite(d) else None)
            for one, d in worst
            if d
        ),
    )


def worst_of(several: Sequence[Gradients]) -> Gradients:
    """One answer for several runs that each had other checkpoints taken out: the worst, with the
    largest distance of each gradient.
    """
    order = ("not-seen", "equal", "rounding", "not-repeatable", "different")
    distances: dict[tuple[str, bool], GradientDistance] = {}
    for one in (one for each in several for one in each.worst):
        known = distances.get((one.name, one.is_buffer))
        if known is None or _far(one) > _far(known):
            distances[one.name, one.is_buffer] = one
    return Gradients(
        max((each.status for each in several), key=order.index),
        compared=max(each.compared for each in several),
        worst=tuple(sorted(distances.values(), key=_far, reverse=True)[:_WORST]),
    )


def _far(one: GradientDistance) -> float:
    return math.inf if one.distance is None else one.distance


def without_in_parts(
    regions: Sequence[Region], run: Callable[[Sequence[Region], int], Trial]
) -> tuple[list[Trial], int]:
    """Runs that together have every checkpoint taken out, as far as they came to their first step's
    end, and around how many regions that was.

    A part that does not fit either is halved, down to single regions. ``run`` runs the script
    without the checkpoints around some of them; it gets the number of the run too, from 1.
    """
    came, taken = [], 0
    waiting = _halves(regions)
    number = 0
    while waiting and number < _MOST_RUNS:
        part, number = waiting.pop(0), number + 1
        trial = run(part, number)
        if trial.gradients and not trial.exit_status:
            came.append(trial)
            taken += len(part)
        elif ran_out(trial) and len(part) > 1:
            waiting = [*_halves(part), *waiting]
    return came, taken


def named_regions(result: Result) -> tuple[Region, ...]:
    """The checkpointed regions that share the name of their module with no other region."""
    names = [region.module for region in result.regions]
    return tuple(
        region
        for region in result.regions
        if region.checkpoints and region.module and names.count(region.module) == 1
    )


def _halves(regions: Sequence[Region]) -> list[Sequence[Region]]:
    middle = (len(regions) + 1) // 2
    return [part for part in (regions[:middle], regions[middle:]) if part]


# Where the unchanged script does not repeat its losses, those with the fix are others only when
# they are this many times as far off as its own, and by this share of the largest loss.
_FAR = 10
_FAR_OF_A_LOSS = 1e-3
# The figures of :class:`Verified` that follow from both step times.
_SAVING = "saving_ms saving_low_ms saving_high_ms saving_pct more_time_pct".split()
# Of the step: a saving that this bounds on both sides is none worth a change.
_SMALL = 0.05


class Trials(Struct, frozen=True):
    """The runs of one verification.

    Attributes:
        before: Runs of the unchanged script, at least one; the first gave the result.
        after: Runs with the fix; none where there was no fix to try.
        without: Runs without any checkpoint; none where that was not asked for.
        switching: Runs that switched the fix on and off from step to step; once they have enough
            steps, the step times are theirs, unless one of them failed.
        plan: Runs with the plan of RS301; none where there was none to try.
        again: A second run of the unchanged script, for its gradients.
        bare: A run without any checkpoint, for its gradients; or several that each had some
            taken out.
        in_parts: Of how many regions they had them taken out; ``None`` of a run without any.
    """

    before: Sequence[Trial]
    after: Sequence[Trial] = ()
    without: Sequence[Trial] = ()
    switching: Sequence[Trial] = ()
    plan: Sequence[Trial] = ()
    again: Sequence[Trial] = ()
    bare: Sequence[Trial] = ()
    in_parts: int | None = None

    def gradients(self, others: Sequence[Trial], in_parts: int | None = None) -> Gradients | None:
        """The unchanged script's against those in other runs; ``None`` without other runs."""
        if not others:
            return None
        mine = self.before[0].gradients
        found = worst_of([compare_gradients(mine, one.gradients, self._twice) for one in others])
        return replace(found, in_parts=in_parts)

    def compared(self) -> ComparedGradients | None:
        """Gradients without any checkpoint that differ from the unchanged script's.

        ``None`` where some checkpoints stayed, where gradients were not seen, and for a script with
        other gradients in each run.
        """
        if len(self.bare) != 1 or self.in_parts is not None or not self.before[0].records:
            return None
        (bare,) = self.bare
        functions = {name for one in bare.measured for name in one.bypassed_functions}
        if not functions and not any(one.bypassed_calls for one in bare.measured):
            return None
        runs = (self.before[0].gradients, bare.gradients, self._twice)
        found = _distances(*([one for one in run if not one.is_buffer] for run in runs))
        if found.status in ("not-seen", "not-repeatable"):
            return None
        return ComparedGradients(
            len(found.apart),
            found.beyond,
            equal=found.status == "equal",
            functions=tuple(sorted(functions)),
        )

    @property
    def _twice(self) -> tuple[Sampled, ...]:
        return self.again[0].gradients if self.again else ()


def verified(
    result: Result,
    removed: tuple[Checkpoint, ...],
    trials: Trials,
    planned: tuple[str, ...] = (),
) -> Result:
    """The result of the first run with its measured section, and the headline that follows from it.

    ``removed`` are the checkpoints that the fix takes out, ``planned`` the modules that lose theirs
    with the plan of RS301.
    """
    section = _with_saving(_measured(removed, trials, planned), trials)
    section = replace(section, outcome=_outcome(section, trials.after))
    if section.outcome == "not-applied":
        section = _without_figures(section)
    compared = trials.compared()
    if compared is not None and result.fidelity is not None:
        result = settle(result, compared, trials.before[0].records[0].sources)
    result = replace(result, verified=section)
    return replace(result, headline=headline(result))


def _measured(
    removed: tuple[Checkpoint, ...], trials: Trials, planned: tuple[str, ...]
) -> Verified:
    """The figures of each way of running the script, without what follows from them."""
    before, after = trials.before, trials.after
    runs = _paired(trials.switching)
    arm_before = _arm(before, [[unchanged for unchanged, _ in run] for run in runs])
    arm_after = _arm(after, [[fixed for _, fixed in run] for run in runs]) if after else None
    if runs and arm_after and arm_before.step_ms and arm_after.step_ms:
        # Of a machine that runs at two speeds the median of either way alone may be of either.
        shares = [fixed / unchanged for run in runs for unchanged, fixed in run]
        step = arm_before.step_ms * median(shares)
        low, high = arm_after.step_low_ms or step, arm_after.step_high_ms or step
        within = {"step_low_ms": min(low, step), "step_high_ms": max(high, step)}
        arm_after = replace(arm_after, step_ms=step, **within)
    losses = _losses(before, after)
    return Verified(
        outcome="not-tried",
        removed=removed,
        before_step_ms=arm_before.step_ms,
        after_step_ms=arm_after.step_ms if arm_after else None,
        **dict.fromkeys(_SAVING),
        before_peak_bytes=_peak(arm_before),
        after_peak_bytes=_peak(arm_after),
        losses_equal={"equal": True, "different": False}.get(losses.status),
        losses=losses,
        before=arm_before,
        after=arm_after,
        without_checkpointing=_arm(trials.without) if trials.without else None,
        switching_runs=len(runs),
        pairs=sum(map(len, runs)),
        with_plan=_with_plan(before, trials.plan, planned) if trials.plan else None,
        gradients=trials.gradients(trials.bare, trials.in_parts),
        gradients_with_fix=trials.gradients(after[:1]),
        memory_grew_bytes=_grew(before, after),
    )


def _paired(switching: Sequence[Trial]) -> list[list[tuple[float, float]]]:
    """The pairs of steps of each run; none where they are too few, or where a run failed."""
    runs = [trial.pairs for trial in switching]
    enough = sum(map(len, runs)) >= FEWEST_PAIRS
    return runs if enough and all(trial.came_through for trial in switching) else []


def _arm(trials: Sequence[Trial], times: Sequence[Sequence[float]] = ()) -> Arm:
    """One way of running the script; ``times`` are steps of other runs to take instead."""
    failed = next((trial for trial in trials if not trial.came_through), None)
    if failed is not None:
        status: Literal["out-of-memory", "failed"] = (
            "out-of-memory" if ran_out(failed) else "failed"
        )
        return Arm(status, message(failed))
    times = [run for run in times if run] or [trial.timed_ms for trial in trials]
    steps = [time for run in times for time in run]
    intervals = [median_interval(run) for run in times]
    seen = next((trial.result for trial in trials if trial.result is not None), None)
    return Arm(
        status="measured",
        runs=len(trials),
        timed_steps=len(steps),
        step_ms=median(steps),
        step_low_ms=min(low for low, _ in intervals),
        step_high_ms=max(high for _, high in intervals),
        peak_allocated_bytes=most(trials, "peak_allocated_bytes"),
        peak_reserved_bytes=most(trials, "peak_reserved_bytes"),
        peak_rss_bytes=most(trials, "peak_rss_bytes"),
        verdict=seen.verdict if seen else None,
        recompute_per_backward=seen.recompute_per_backward if seen else None,
    )


def _peak(arm: Arm | None) -> int | None:
    if arm is None:
        return None
    return arm.peak_rss_bytes if arm.peak_allocated_bytes is None else arm.peak_allocated_bytes


def _grew(before: Sequence[Trial], after: Sequence[Trial]) -> int | None:
    """How much higher the peak is with the fix; ``None`` where runs of one way differ by more."""
    for name in ("peak_allocated_bytes", "peak_rss_bytes"):
        mine, others = ([most([one], name) for one in runs] for runs in (before, after))
        without = [peak for peak in mine if peak is not None]
        fixed = [peak for peak in others if peak is not None]
        if without and fixed:
            return round(median(fixed) - median(without)) if min(fixed) > max(without) else None
    return None


def _with_saving(section: Verified, trials: Trials) -> Verified:
    step, then = section.before_step_ms, section.after_step_ms
    if step is None or then is None:
        return section
    pairs = [pair for run in _paired(trials.switching) for pair in run]
    rounds = [(b.timed_ms, a.timed_ms) for b, a in zip(trials.before, trials.after, strict=False)]
    low, high = pair_interval(pairs) if pairs else ratio_interval(rounds)
    saved = step - then
    return replace(
        section,
        saving_ms=saved,
        saving_low_ms=min(saved, step * (1 - high)),
        saving_high_ms=max(saved, step * (1 - low)),
        saving_pct=100 * saved / step,
        more_time_pct=100 * saved / then,
    )


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
    """The section without figures: the unchanged script ran once more, without the fix."""
    figures = (
        "after after_step_ms after_peak_bytes memory_grew_bytes losses_equal gradients_with_fix"
    )
    unknown = dict.fromkeys((*figures.split(), *_SAVING))
    return replace(section, **unknown, losses=Losses("not-seen"))


def _with_plan(
    before: Sequence[Trial], plan: Sequence[Trial], planned: tuple[str, ...]
) -> WithPlan:
    arm = _arm(plan)
    if arm.status != "measured":
        return WithPlan(planned, arm, Losses("not-seen"))
    taken = any(measured.bypassed_calls for trial in plan for measured in trial.measured)
    regions = [region for trial in plan if trial.result for region in trial.result.regions]
    stay = any(region.checkpoints for region in regions if region.module in planned)
    if stay or not taken:
        return WithPlan(planned, None, Losses("not-seen"))
    return WithPlan(planned, arm, _losses(before, plan))


def _losses(before: Sequence[Trial], after: Sequence[Trial]) -> Losses:
    """Losses of every run against the first unchanged one, rank by rank."""
    measured = [item for trial in before for item in trial.measured]
    seeded = all(item.seeded for item in measured) if measured else None
    # Some runs go on further than others, to be recorded.
    runs = [item for trial in (*before, *after) for item in trial.measured]
    compared = min((len(item.losses) for item in runs), default=0) if after else 0
    if not compared:
        return Losses("not-seen", seeded_by_script=seeded)
    repeat = _largest_difference(before[0], before[1:], compared)
    changed = _largest_difference(before[0], after, compared)
    status: Literal["equal", "different", "not-repeatable"] = "not-repeatable"
    if repeat == 0.0:
        status = "equal" if changed == 0.0 else "different"
    elif repeat is not None:
        losses = (loss for rank in before[0].measured for loss in rank.losses[:compared])
        largest = max(abs(float.fromhex(loss)) for loss in losses)
        most = max(_FAR * repeat, _FAR_OF_A_LOSS * largest)
        status = "different" if changed is None or changed > most else "not-repeatable"
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
