"""The verdict in one sentence."""

from __future__ import annotations

from recompute_scan.result import MEASURED, Result
from recompute_scan.units import ms

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


def _decapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
