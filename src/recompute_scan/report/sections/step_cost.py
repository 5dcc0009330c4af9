"""What recomputes cost: where a step's time goes, and how sure the step time is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.intervals import is_sure, too_wide
from recompute_scan.report.bars import cost_bars
from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section, analysed
from recompute_scan.report.summary import fix_sentence, step_after
from recompute_scan.report.words import device_words
from recompute_scan.result import Result
from recompute_scan.units import plural, span

# Of the longer bar, in per cent; a slice has two decimals.
_THINNEST = 0.01
_TOO_WIDE = "The step times vary too much to rely on"


def step_time_sentences(result: Result) -> list[str]:
    """Where the step time is from and how sure it is; none without one."""
    cost = result.cost
    if cost is None:
        return []
    head = f"Step time on {visible(device_words(result), 80)}"
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
    found = [
        f"{head}: median of {source}; {likely} {span(cost.step_low_ms, cost.step_high_ms, 'and')}."
    ]
    if too_wide(cost.step_ms, cost.step_low_ms, cost.step_high_ms):
        more = (
            "time more of them with --timing-steps" if timed else "time with `recompute-scan run`"
        )
        found.append(f"{_TOO_WIDE}: {more}, on a machine that does nothing else.")
    return found


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "bars": cost_bars(result),
        "fix": fix_sentence(result),
        "step_times": step_time_sentences(result),
    }


def _is_predicted(result: Result) -> bool:
    """Whether the step after the fix is a prediction; what was measured has its own section."""
    step = step_after(result)
    return step is not None and not step.measured


def _text(page: Page, result: Result) -> None:
    if not _is_predicted(result):
        return
    fix = fix_sentence(result)
    page.title("Cost" if fix else "Step time")
    for sentence in [*([fix] if fix else []), *step_time_sentences(result)]:
        page.prose(sentence)


def _markdown(result: Result) -> str:
    parts = [_pie(result)]
    if _is_predicted(result):
        fix = fix_sentence(result)
        words = [*([fix] if fix else []), *step_time_sentences(result)]
        parts.append(markdown_prose(" ".join(words)))
    return "\n\n".join(part for part in parts if part)


def _pie(result: Result) -> str:
    """The step in its parts, as text of which GitHub and GitLab draw a picture: they take out
    drawings that are in a summary or comment themselves.
    """
    bars = cost_bars(result)
    if bars is None:
        return ""
    widths = {part.kind: part.width for part in bars.before}
    slices = [
        f'    "{row.name}, {row.before}" : {widths[row.kind]:.2f}'
        for row in bars.table
        if widths.get(row.kind, 0) >= _THINNEST
    ]
    head = f"pie title One step takes {bars.total_before}"
    return "\n".join(["```mermaid", head, *slices, "```"]) if slices else ""


SECTION = Section(
    anchor="cost",
    title="What it costs",
    template="step_cost.html",
    present=lambda result: analysed(result) and result.cost is not None,
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
