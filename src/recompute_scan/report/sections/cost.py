"""Sections on cost: the step, the device, the measured fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from recompute_scan.intervals import is_sure
from recompute_scan.report.blocks import Page, Section, analysed, known
from recompute_scan.report.figures import CurveDrawing, cost_bars, curve_drawing
from recompute_scan.report.layout import (
    measured_sentences,
    measured_title,
    plan_arm,
    predicted_plan,
)
from recompute_scan.report.summary import (
    TOO_WIDE,
    fix_sentence,
    predicted_beside,
    ratio_row,
    step_after,
)
from recompute_scan.report.templating import markdown_prose, visible
from recompute_scan.report.words import device_words, mechanism_words
from recompute_scan.result import Arm, Flops, Hta, Memory, MemoryPlan, Result, Verified
from recompute_scan.units import UNKNOWN, ms, pct, plural, share, size, span, times

# Of the longer bar, in per cent; a slice has two decimals.
_THINNEST = 0.01


def step_time_sentences(result: Result) -> list[str]:
    """Where the step time is from and how sure it is; none without one."""
    cost = result.cost
    if cost is None:
        return []
    head = f"Step time on {visible(device_words(result), 80)}"
    arm = result.verified.before if result.verified is not None else None
    if arm is not None and arm.step_low_ms is not None and not _is_predicted(result):
        # The bars are of this step, and not of the one that was recorded.
        likely = span(arm.step_low_ms, arm.step_high_ms, "and")
        return [
            f"{head}: median of {plural(arm.timed_steps, 'step')} without the profiler; "
            f"likely between {likely}.",
            "The recorded step's parts were scaled to it.",
        ]
    timed = cost.step_source == "timed"
    if not cost.steps:  # a result of a version that did not count them
        return [f"{head}, {'timed without the profiler' if timed else 'as recorded'}."]
    if timed:
        source = f"{plural(cost.steps, 'step')} without the profiler"
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
    if cost.times_vary:
        more = (
            "time more of them with --timing-steps" if timed else "time with `recompute-scan run`"
        )
        found.append(f"{TOO_WIDE}: {more}, on a machine that does nothing else.")
    return found


def _is_predicted(result: Result) -> bool:
    """Whether the step after the fix is a prediction; measurements have their own section."""
    step = step_after(result)
    return step is not None and not step.measured


def _step_cost_text(page: Page, result: Result) -> None:
    if not _is_predicted(result):
        return
    fix = fix_sentence(result)
    page.title("Cost" if fix else "Step time")
    for sentence in filter(None, (fix, *step_time_sentences(result))):
        page.prose(sentence)


def _step_cost_markdown(result: Result) -> str:
    parts = [_pie(result)]
    if _is_predicted(result):
        said = filter(None, (fix_sentence(result), *step_time_sentences(result)))
        parts.append(markdown_prose(" ".join(said)))
    return "\n\n".join(part for part in parts if part)


def _pie(result: Result) -> str:
    """The step in its parts, as text that GitHub and GitLab draw: they take out drawings that a
    summary or comment holds.
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


STEP_COST = Section(
    anchor="cost",
    title="Cost",
    template="step_cost.html",
    present=lambda result: analysed(result) and result.cost is not None,
    html=lambda result: {
        "bars": cost_bars(result),
        "fix": fix_sentence(result),
        "step_times": step_time_sentences(result),
    },
    text=_step_cost_text,
    markdown=_step_cost_markdown,
    link="Cost",
    help=(
        "Cost",
        "splits one step into its parts. The hatched part goes away with the fix; the bar below "
        "is the step without it, and the line with two ends is the range in which the true value "
        "is expected.",
    ),
)


_PREFIXES = ("", "K", "M", "G", "T", "P", "E")


def _curve(memory: Memory) -> tuple[CurveDrawing, str] | None:
    """The drawing of time against memory and its words; ``None`` with fewer than two plans."""
    plans = memory.plans
    if len(plans) < 2:
        return None
    marks = [
        (plan, "plan" if place == memory.chosen else "curve", _plan_words(plan))
        for place, plan in enumerate(plans)
    ]
    said = f"From {_plan_words(plans[0])} to {_plan_words(plans[-1])}, with no redundant recompute."
    if memory.chosen is not None:
        said += f" What fits: {_plan_words(plans[memory.chosen])}."
    return curve_drawing(plans, marks, memory.budget_bytes), said


def _plan_words(plan: MemoryPlan) -> str:
    without = f"{plural(len(plan.regions), 'block')} without checkpoint"
    which = without if plan.regions else "every block checkpointed"
    return f"{which}: {ms(plan.step_ms)} per step, {size(plan.peak_bytes)}"


def _memory_sentences(memory: Memory) -> list[str]:
    """The contents of the device's memory, the savings by checkpoints, and the free part."""
    said = []
    if memory.peak_allocated_bytes is not None:
        reserved = (
            f", and torch held {size(memory.peak_reserved_bytes)}"
            if memory.peak_reserved_bytes is not None
            else ""
        )
        said.append(
            f"At most {size(memory.peak_allocated_bytes)} were allocated in the recorded step"
            f"{reserved}, of {size(memory.capacity_bytes)} that the device has."
        )
    saved = [one.saved_bytes for one in memory.regions if one.saved_bytes is not None]
    if saved:
        said.append(
            f"The checkpoints of {plural(len(saved), 'block')} keep {size(sum(saved))} out of "
            "memory in each micro-batch."
        )
    if memory.reason:
        said.append(visible(memory.reason, 400))
    return said


def _flops_table(flops: Flops, *, told_apart: bool) -> list[tuple[str, str, str]]:
    """Part of the step, its operations, and their share of all that ran.

    Recomputes have no row unless they could be ``told_apart`` from the backward pass.
    """
    parts = [
        ("Forward pass", flops.forward_per_step),
        ("Backward pass", flops.backward_per_step),
    ]
    every, redundant = flops.recompute_per_step, flops.redundant_per_step
    if told_apart:
        first = None if every is None or redundant is None else every - redundant
        parts += [("First recomputes", first), ("Redundant recomputes", redundant)]
    known = [value for _, value in parts if value is not None]
    whole = sum(known)
    if not whole:
        return []
    rows = [(name, _operations(value), share((value or 0.0) / whole)) for name, value in parts]
    all_of_it = "All that could be counted" if flops.uncounted else "All that ran"
    return [*rows, (all_of_it, _operations(whole), "")]


def _flops_sentences(flops: Flops) -> list[str]:
    """Sentences on the figures, and on operators that they leave out."""
    said = []
    if flops.hfu is not None and flops.peak_tflops is not None:
        counted = "what could be counted" if flops.uncounted else "all that ran"
        reached = f"The device reached {share(flops.hfu)} of its peak with {counted} (HFU)"
        if flops.mfu is not None:
            reached += f", {share(flops.mfu)} with what the model needs (MFU)"
        said.append(
            f"{reached}. Peak for the number types that ran: {flops.peak_tflops:,.1f} TFLOP/s, "
            f"{flops.peak_source}."
        )
    elif flops.hfu_over_mfu is not None:
        said.append(
            "The device's peak is unknown, so HFU and MFU are too; their ratio needs no peak. "
            "--peak-tflops sets the peak."
        )
    if flops.uncounted:
        named = ", ".join(visible(name, 60) for name in flops.uncounted)
        said.append(f"Not counted, because a formula or shapes are missing: {named}.")
    if flops.reason:
        said.append(visible(flops.reason, 400))
    return said


def _operations(value: float | None) -> str:
    """``3.77 TFLOP``: floating-point operations with three significant digits."""
    if value is None:
        return UNKNOWN
    power = 0
    while value >= 1000 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if value >= 100 or not power else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {_PREFIXES[power]}FLOP"


def _device_use_html(result: Result) -> Mapping[str, Any]:
    flops, memory = result.flops, result.memory
    told_apart = result.verdict != "inconclusive"
    return {
        "ratio": ratio_row(result),
        "flops_rows": _flops_table(flops, told_apart=told_apart) if flops else [],
        "flops_sentences": _flops_sentences(flops) if flops else [],
        "memory_sentences": _memory_sentences(memory) if memory else [],
        "curve": _curve(memory) if memory else None,
    }


def _present(result: Result) -> bool:
    counted = result.flops is not None and (result.flops.reason is None or result.flops.peak_tflops)
    return analysed(result) and bool(counted or result.memory)


DEVICE_USE = Section(
    anchor="device",
    title="How well the device is used",
    template="device_use.html",
    present=_present,
    html=_device_use_html,
    markdown=lambda result: (
        markdown_prose(" ".join(_memory_sentences(result.memory))) if result.memory else ""
    ),
    link="Device",
)


# Columns that a terminal has room for; more go into a second table.
_MOST_COLUMNS = 3
_NOTHING = "-"


class _Table(Struct, frozen=True):
    """Columns from the unchanged script on; each row has a label and one cell a column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def _table(result: Result, verified: Verified) -> _Table:
    """The measured figures side by side, the prediction among them; no row without a figure."""
    plan = plan_arm(verified)
    arms = {
        "Unchanged": verified.before,
        "With the fix": verified.after,
        "With the plan": plan,
        "No checkpoints": verified.without_checkpointing,
    }
    shown = {name: arm for name, arm in arms.items() if arm is not None}
    with_fix, with_plan = predicted_beside(result), predicted_plan(result)

    def predicted(arm: Arm) -> str:
        if arm is verified.after and with_fix:
            return ms(with_fix.after_ms)
        return ms(with_plan.step_ms) if arm is plan and with_plan else _NOTHING

    figures: tuple[tuple[str, Callable[[Arm], str]], ...] = (
        ("Step time", lambda arm: ms(arm.step_ms)),
        ("Likely range", lambda arm: span(arm.step_low_ms, arm.step_high_ms)),
        ("Predicted", predicted),
        ("GPU memory, allocated", lambda arm: size(arm.peak_allocated_bytes)),
        ("GPU memory, reserved", lambda arm: size(arm.peak_reserved_bytes)),
        ("Process memory", lambda arm: size(arm.peak_rss_bytes)),
        ("Recomputes per layer", lambda arm: times(arm.recompute_per_backward)),
    )
    rows = []
    for label, figure in figures:
        measured = [figure(arm) if arm.status == "measured" else _NOTHING for arm in shown.values()]
        if any(text not in (UNKNOWN, _NOTHING) for text in measured):
            rows.append((label, tuple(measured)))
    return _Table(tuple(shown), tuple(rows))


def _removed(verified: Verified) -> list[str]:
    """The checkpoints that were taken out in memory: what each is, and where it was switched on."""
    return [
        mechanism_words(one) + (f" at {one.call_site}" if one.call_site else "")
        for one in verified.removed
    ]


def _measured_fix_text(page: Page, result: Result) -> None:
    verified = known(result.verified)
    table = _table(result, verified)
    page.title(measured_title(result))
    opening, *others = measured_sentences(result)
    page.prose(opening)
    for removed in _removed(verified):
        page.prose(f"Taken out: {visible(removed, 300)}", "    ", "  ")
    page.written.append("")
    rows = [("", table.columns), *table.rows]
    for first in range(0, len(table.columns), _MOST_COLUMNS):
        for label, cells in rows:
            shown = cells[first : first + _MOST_COLUMNS]
            page.written.append(f"  {label:<21}" + "".join(f"{cell:>19}" for cell in shown))
        page.written.append("")
    for sentence in others:
        page.prose(sentence)


def _measured_fix_markdown(result: Result) -> str:
    verified = known(result.verified)
    table = _table(result, verified)
    first, *others = measured_sentences(result)
    rows = [f"| {label} | {' | '.join(cells)} |" for label, cells in table.rows]
    head = f"| | {' | '.join(table.columns)} |"
    taken = [f"- {markdown_prose(removed[:300])}" for removed in _removed(verified)]
    parts = [
        f"#### {measured_title(result)}",
        markdown_prose(first),
        "\n".join(["Taken out in memory:", "", *taken]) if taken else "",
        "\n".join([head, "| --- |" + " ---: |" * len(table.columns), *rows]),
        markdown_prose(" ".join(others)),
    ]
    return "\n\n".join(part for part in parts if part)


MEASURED_FIX = Section(
    anchor="measured",
    title=measured_title,
    template="measured_fix.html",
    present=lambda result: analysed(result) and result.verified is not None,
    html=lambda result: {
        "table": _table(result, known(result.verified)),
        "sentences": measured_sentences(result),
        "removed": _removed(known(result.verified)),
    },
    text=_measured_fix_text,
    markdown=_measured_fix_markdown,
    link="Measured",
)


_COLUMNS = ("HTA", "recompute-scan")
_SAYS = (
    "Over all recorded steps. Every kernel that is neither communication nor a copy counts as "
    "computing."
)
# Of a table on a terminal: the first column; two of 16 follow it.
_WIDEST_LABEL = 46


def _title(result: Result) -> str:
    """``Holistic Trace Analysis``, with the rank of the breakdown where there are several."""
    if result.hta is None or result.hta.rank is None or len(result.ranks) < 2:
        return "Holistic Trace Analysis"
    return f"Holistic Trace Analysis of rank {result.hta.rank}"


def _rows(hta: Hta) -> list[tuple[str, str, str]]:
    """The figures of Holistic Trace Analysis, and those that recompute-scan counts of the same."""
    own = hta.own
    parts = {
        "Idle": "idle_pct",
        "Computing": "compute_pct",
        "Busy without computing": "non_compute_pct",
        "Communication during computation": "overlap_pct",
    }
    whole = ms(own.kernel_time_ms) if own else ""
    return [
        ("GPU time, first kernel to last", ms(hta.kernel_time_ms), whole),
        *(
            (label, pct(getattr(hta, name)), pct(getattr(own, name)) if own else "")
            for label, name in parts.items()
        ),
        *(
            (f"Kernels: {visible(kind, 60)}", pct(part), "")
            for kind, part in list(hta.kernel_types.items())[:20]
        ),
    ]


def _hta_figures_text(page: Page, result: Result) -> None:
    page.title(_title(result))
    page.prose(_SAYS)
    page.written.append("")
    for label, *values in [("", *_COLUMNS), *_rows(known(result.hta))]:
        line = f"  {label[:_WIDEST_LABEL]:<{_WIDEST_LABEL}}" + "".join(f"{v:>16}" for v in values)
        page.written.append(line.rstrip())


def _hta_figures_markdown(result: Result) -> str:
    rows = [
        f"| {markdown_prose(name)} | {value} | {own} |"
        for name, value, own in _rows(known(result.hta))
    ]
    head = [f"| | {' | '.join(_COLUMNS)} |", "| --- | ---: | ---: |"]
    return "\n\n".join([f"#### {_title(result)}", _SAYS, "\n".join([*head, *rows])])


HTA_FIGURES = Section(
    anchor="hta",
    title=_title,
    template="hta_figures.html",
    present=lambda result: analysed(result) and result.hta is not None,
    html=lambda result: {"rows": _rows(known(result.hta)), "columns": _COLUMNS, "says": _SAYS},
    text=_hta_figures_text,
    markdown=_hta_figures_markdown,
)
