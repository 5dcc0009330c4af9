"""The verdict in one sentence, and how sure it is."""

from __future__ import annotations

from recompute_scan.recompute.facts import Recompute
from recompute_scan.result import Level, Result
from recompute_scan.units import ms

_DOUBTFUL_SHARE = 0.02
_DOUBTFUL_NUMBER = 3
_MANY_UNLAUNCHED = 0.3


def headline(result: Result) -> str:
    """The verdict in one sentence, with the number that matters most: measured, else predicted."""
    highest = result.recompute_per_backward or 0.0
    if result.verdict == "inconclusive":
        return f"This trace cannot tell: {_decapitalised(result.reason or 'no reason known')}"
    if result.verdict == "none":
        return "No forward work runs again in the backward pass: nothing is recomputed."
    if result.verdict == "full":
        return "Every block runs its forward once more in the backward pass: checkpointed once."
    if result.verdict == "partial":
        share = 100 * (result.recomputed_share or 0.0)
        return f"{share:.0f} % of the forward work runs once more in the backward pass."
    doubled = [r for r in result.regions if r.recompute_runs_per_backward >= 2]
    which = (
        "Every block"
        if doubled and len(doubled) == len(result.regions)
        else f"{len(doubled)} of {len(result.regions)} blocks"
        if doubled
        else "Part of the forward"
    )
    verb = "run their" if doubled and len(doubled) < len(result.regions) else "runs its"
    return (
        f"Checkpointing is doubled: {_decapitalised(which)} {verb} forward {highest:g} more times "
        f"in each backward pass{_gain(result)}."
    )


def _gain(result: Result) -> str:
    verified = result.verified
    if verified is None or verified.outcome in ("not-tried", "not-applied", "failed"):
        return f" and {result.cost.saving_pct:.0f} % of the step is wasted" if result.cost else ""
    if verified.outcome == "losses-differ":
        return "; the fix was tried, and it changes the losses"
    before, after = ms(verified.before_step_ms), ms(verified.after_step_ms)
    if verified.outcome == "helps":
        return f"; a step takes {before}, and with the fix {after}, measured"
    if verified.outcome == "slower":
        return f"; the fix was tried, and a step takes {after} instead of {before}"
    return f"; the fix was tried, and a step takes as long as before ({before})"


def confidence(facts: Recompute) -> Level:
    """How sure the counts are, by written rules.

    ``low``: no verdict, or over 30 % of the kernels have no record of their launch. ``medium``:
    only one complete step, steps that disagree, or marks that do not agree with the operators.
    Else ``high``.
    """
    if facts.judgement.verdict == "inconclusive":
        return "low"
    kernels = len(facts.kernels.event)
    if kernels and facts.work.unlaunched > _MANY_UNLAUNCHED * kernels:
        return "low"
    if marks_disagree(facts) or facts.complete_count < 2 or not _steps_agree(facts):
        return "medium"
    return "high"


def marks_disagree(facts: Recompute) -> bool:
    """Do the run wrapper's marks and the operators differ by more than a stray few?"""
    marks = facts.marks
    if marks is None:
        return False
    allowed = max(_DOUBTFUL_NUMBER, _DOUBTFUL_SHARE * marks.replayed)
    return marks.disagreeing > allowed


def _steps_agree(facts: Recompute) -> bool:
    counts = facts.counts
    values = set()
    for step in range(len(facts.steps)):
        mine = counts.counted & (counts.step == step)
        if mine.any():
            values.add(counts.highest(mine))
    return len(values) <= 1


def _decapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
