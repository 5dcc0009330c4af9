"""The verdict in one sentence, and how sure it is."""

from __future__ import annotations

from recompute_scan.recompute.agreement import disagreeing_steps
from recompute_scan.recompute.facts import Recompute
from recompute_scan.result import MEASURED, Level, Result
from recompute_scan.trace.health import lost_evidence
from recompute_scan.units import ms

_DOUBTFUL_SHARE = 0.02
_DOUBTFUL_NUMBER = 3
_MANY_UNLAUNCHED = 0.3
# Calls whose place among the others is a guess, as shares of all. Measured on traces cut to whole
# microseconds: up to 0.14 % and every answer right on hosts as fast as today's; the first wrong
# answer at 0.35 %, and over 2.5 % where a file's order was lost.
_SOME_GUESSED, _MANY_GUESSED = 0.002, 0.02
# Less of a step, in %, is not said to be wasted.
_WORTH_SAYING = 0.5


def headline(result: Result) -> str:
    """The verdict in one sentence, with the number that matters most: measured, else predicted."""
    highest = result.recompute_per_backward or 0.0
    if result.verdict == "inconclusive":
        return f"This trace cannot tell: {_decapitalised(result.reason or 'no reason known')}"
    if result.evidence_level == "kernels":
        return _headline_of_attention(result)
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
    if verified is None or verified.outcome not in MEASURED:
        wasted = result.cost.saving_pct if result.cost else 0.0
        return f" and {wasted:.0f} % of the step is wasted" if wasted >= _WORTH_SAYING else ""
    if verified.outcome == "losses-differ":
        return "; the fix was tried, and it changes the losses"
    before, after = ms(verified.before_step_ms), ms(verified.after_step_ms)
    if verified.outcome == "helps":
        return f"; a step takes {before}, and with the fix {after}, measured"
    if verified.outcome == "slower":
        return f"; the fix was tried, and a step takes {after} instead of {before}"
    return f"; the fix was tried, and a step takes as long as before ({before})"


def _headline_of_attention(result: Result) -> str:
    """The same where attention's kernels are all there is to go by."""
    verdict, highest = result.verdict, result.recompute_per_backward or 0.0
    if verdict == "none":
        return "No attention forward runs again in the backward pass; nothing else could be seen."
    if verdict == "full":
        return "Every attention forward runs once more in the backward pass: checkpointed once."
    if verdict == "partial":
        return "Some attention forwards run once more in the backward pass."
    return (
        f"Checkpointing is doubled: attention's forward runs {highest:g} more times in each "
        "backward pass."
    )


def confidence(facts: Recompute) -> Level:
    """How sure the counts are, by written rules (``docs/design.md``).

    ``low``: no verdict; over 30 % of the kernels without a record of their launch; over 2 % of
    the calls in a place that is a guess; or attention's kernels alone, and no launching thread
    tells replays apart, nothing marks the steps, or steps differ. ``medium``: attention's kernels
    alone; only one complete step; steps that differ; marks that disagree with the operators; a
    plain count that disagrees, or is of nothing; over 0.2 % of the calls in a place that is a
    guess; part of the trace lost. Else ``high``.
    """
    attention = facts.attention if facts.level == "kernels" else None
    unsure = _many_unlaunched(facts) or places_guessed(facts, _MANY_GUESSED)
    if facts.judgement.verdict == "inconclusive" or unsure:
        return "low"
    if attention is not None:
        told = attention.by_thread and attention.steps_marked and not disagreeing_steps(facts)
        return "medium" if told else "low"
    lost = lost_evidence(facts.trace.health)
    alone = facts.plain.agrees is not True
    doubtful = marks_disagree(facts) or facts.complete_count < 2 or disagreeing_steps(facts)
    return "medium" if lost or doubtful or alone or places_guessed(facts) else "high"


def places_guessed(facts: Recompute, most: float = _SOME_GUESSED) -> bool:
    """Is the place of more than this share of the calls a guess?"""
    return facts.calls.guessed > most * len(facts.calls)


def marks_disagree(facts: Recompute) -> bool:
    """Do the run wrapper's marks and the operators differ by more than a stray few?"""
    marks = facts.marks
    if marks is None:
        return False
    allowed = max(_DOUBTFUL_NUMBER, _DOUBTFUL_SHARE * marks.replayed)
    return marks.disagreeing > allowed


def _many_unlaunched(facts: Recompute) -> bool:
    return facts.work.unlaunched > _MANY_UNLAUNCHED * max(1, len(facts.kernels.event))


def _decapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
