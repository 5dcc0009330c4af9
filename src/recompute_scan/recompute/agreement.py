"""Do the steps of one trace say the same?"""

from __future__ import annotations

from collections import Counter

from recompute_scan.recompute.facts import Recompute


def highest_of_steps(facts: Recompute) -> dict[int, float | None]:
    """Highest multiplicity that matters, by the number of each complete step.

    ``None`` where a step's attention kernels cannot be read.
    """
    if facts.level == "kernels":
        steps = facts.attention.steps if facts.attention else ()
        return {step.span.index: step.highest for step in steps}
    counts = facts.counts
    highest: dict[int, float | None] = {}
    for place, step in enumerate(facts.steps):
        mine = counts.counted & (counts.step == place)
        if mine.any():
            highest[step.index] = counts.highest(mine)
    return highest


def disagreeing_steps(facts: Recompute) -> dict[int, float | None]:
    """The steps whose highest multiplicity is not the commonest one, with theirs."""
    found = highest_of_steps(facts)
    if not found:
        return {}
    (commonest, _), *_ = Counter(found.values()).most_common()
    return {step: value for step, value in found.items() if value != commonest}
