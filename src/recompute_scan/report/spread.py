"""How sure a step time is: what it is the median of, and how far the steps lie apart."""

from __future__ import annotations

from recompute_scan.intervals import is_sure, too_wide
from recompute_scan.report.words import device_words
from recompute_scan.result import Cost, Result
from recompute_scan.units import ms

_TOO_WIDE = "The step times vary too much for a figure to rest on them"


def step_time_sentences(result: Result) -> list[str]:
    """Where the step time is from and how sure it is; none without one."""
    cost = result.cost
    if cost is None:
        return []
    head = f"Step times on {device_words(result)}"
    timed = cost.step_source == "timed"
    if not cost.steps:  # a result of a version that did not count them
        return [f"{head}, {'timed without the profiler' if timed else 'as recorded'}."]
    source = "timed without the profiler" if timed else "recorded, which the profiler slows down"
    if cost.steps == 1:
        return [f"{head}: a single one {source}; how far they vary is not known."]
    if cost.step_low_ms is None or cost.step_high_ms is None:
        return [f"{head}: median of {cost.steps} {source}."]
    likely = "likely between" if is_sure(cost.steps) else "all between"
    found = [f"{head}: median of {cost.steps} {source}, {likely} {span(cost)}."]
    if too_wide(cost.step_ms, cost.step_low_ms, cost.step_high_ms):
        more = "time more with --timing-steps" if timed else "time some with `recompute-scan run`"
        found.append(f"{_TOO_WIDE}: {more}, on a machine that does nothing else.")
    return found


def span(cost: Cost) -> str:
    """``131.0 and 139.2 ms``, for use after "between"; both ends must be known."""
    return f"{ms(cost.step_low_ms).removesuffix(' ms')} and {ms(cost.step_high_ms)}"
