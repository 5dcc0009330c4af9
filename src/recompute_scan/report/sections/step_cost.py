"""What recomputes cost: where a step's time goes, and how sure the step time is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.intervals import is_sure, too_wide
from recompute_scan.report.bars import cost_bars
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.report.summary import saving, step_after
from recompute_scan.report.words import device_words
from recompute_scan.result import Cost, Result
from recompute_scan.units import ms, pct, plural

_TOO_WIDE = "The step times vary too much to rely on"


def _waste_sentences(result: Result) -> list[str]:
    """What is redundant and its predicted cost, in whole sentences: time first, throughput apart.

    None where the fix was measured: :mod:`recompute_scan.report.measured` has better ones.
    """
    found, step = saving(result), step_after(result)
    if found is None or step is None or step.measured:
        return []
    return [
        f"A step takes {pct(found.more_time_pct)} more time than needed "
        f"(the fix would save {ms(found.saved_ms)}).",
        f"Put as throughput, {pct(found.throughput_pct)} of it is lost.",
    ]


def step_time_sentences(result: Result) -> list[str]:
    """Where the step time is from and how sure it is; none without one."""
    cost = result.cost
    if cost is None:
        return []
    head = f"Step time on {device_words(result)}"
    timed = cost.step_source == "timed"
    if not cost.steps:  # a result of a version that did not count them
        return [f"{head}, {'timed without the profiler' if timed else 'as recorded'}."]
    if timed:
        source = f"{plural(cost.steps, 'step')} timed without the profiler"
    else:
        source = f"{plural(cost.steps, 'recorded step')}, slowed down by the profiler"
    if cost.steps == 1:
        return [f"{head}: {source}; how far step times vary is not known."]
    if cost.step_low_ms is None or cost.step_high_ms is None:
        return [f"{head}: median of {source}."]
    likely = "likely between" if is_sure(cost.steps) else "all between"
    found = [f"{head}: median of {source}; {likely} {_between(cost)}."]
    if too_wide(cost.step_ms, cost.step_low_ms, cost.step_high_ms):
        more = (
            "time more of them with --timing-steps" if timed else "time with `recompute-scan run`"
        )
        found.append(f"{_TOO_WIDE}: {more}, on a machine that does nothing else.")
    return found


def _between(cost: Cost) -> str:
    """``131.0 and 139.2 ms``, for use after "between"; both ends must be known."""
    return f"{ms(cost.step_low_ms).removesuffix(' ms')} and {ms(cost.step_high_ms)}"


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "bars": cost_bars(result),
        "waste": _waste_sentences(result),
        "step_times": step_time_sentences(result),
    }


def _is_predicted(result: Result) -> bool:
    """Whether the step after the fix is a prediction; what was measured has its own section."""
    step = step_after(result)
    return step is not None and not step.measured


def _text(page: Page, result: Result) -> None:
    if not _is_predicted(result):
        return
    waste = _waste_sentences(result)
    page.title("Cost" if waste else "Step time")
    for sentence in [*waste, *step_time_sentences(result)]:
        page.prose(sentence)


def _markdown(result: Result) -> str:
    if not _is_predicted(result):
        return ""
    return " ".join([*_waste_sentences(result), *step_time_sentences(result)])


SECTION = Section(
    anchor="cost",
    title="What it costs",
    template="step_cost.html",
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Cost",
    help=(
        "What it costs",
        "splits one step into its parts. The hatched part goes away with the fix; the bar below "
        "is the step without it, and the line with two ends is the range in which the true value "
        "is expected.",
    ),
)
