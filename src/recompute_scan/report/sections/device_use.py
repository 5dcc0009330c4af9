"""How well the device is used: arithmetic, memory, and what fewer checkpoints would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.section import Section, analysed
from recompute_scan.report.summary import ratio_row
from recompute_scan.result import Flops, Memory, MemoryPlan, Result
from recompute_scan.units import UNKNOWN, ms, plural, share, size

_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
# The drawing of time against memory: height in pixels, and what is left free of the width, in %.
_TOP, _BOTTOM = 24, 176
_LEFT, _RIGHT = 4.0, 96.0


class HeadroomPoint(Struct, frozen=True):
    """One plan in the drawing of time against memory; x in per cent of the width, y in pixels."""

    x: float
    y: float
    chosen: bool
    tooltip: str


class PlanChart(Struct, frozen=True):
    """The plans from left (least memory) to right; ``budget`` is where memory ends, in per cent."""

    points: tuple[HeadroomPoint, ...]
    budget: float | None
    summary: str


def _plan_chart(memory: Memory) -> PlanChart | None:
    """The drawing; ``None`` with fewer than two plans."""
    plans = memory.plans
    if len(plans) < 2:
        return None
    peaks = [plan.peak_bytes for plan in plans]
    ends = [*peaks, memory.budget_bytes] if memory.budget_bytes else peaks
    low, high = min(ends), max(ends)
    fastest, slowest = min(p.step_ms for p in plans), max(p.step_ms for p in plans)

    def across(value: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (value - low) / max(1, high - low), 2)

    def down(value: float) -> float:
        scale = (slowest - value) / (slowest - fastest) if slowest > fastest else 0.0
        return round(_TOP + (_BOTTOM - _TOP) * scale, 1)

    points = tuple(
        HeadroomPoint(
            across(plan.peak_bytes), down(plan.step_ms), place == memory.chosen, _plan_words(plan)
        )
        for place, plan in enumerate(plans)
    )
    summary = f"From {_plan_words(plans[0])} to {_plan_words(plans[-1])}."
    if memory.chosen is not None:
        summary += f" What fits: {_plan_words(plans[memory.chosen])}."
    return PlanChart(points, across(memory.budget_bytes) if memory.budget_bytes else None, summary)


def _plan_words(plan: MemoryPlan) -> str:
    which = plural(len(plan.regions), "block") if plan.regions else "no block"
    return f"{which} without checkpoint: {ms(plan.step_ms)} per step, {size(plan.peak_bytes)}"


def _memory_sentences(memory: Memory) -> list[str]:
    """What the device's memory held, what checkpoints kept out of it, what is free."""
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
    if told_apart:
        parts += [
            ("First recomputes", _less(flops.recompute_per_step, flops.redundant_per_step)),
            ("Redundant recomputes", flops.redundant_per_step),
        ]
    known = [value for _, value in parts if value is not None]
    whole = sum(known)
    if not whole:
        return []
    rows = [(name, _operations(value), share((value or 0.0) / whole)) for name, value in parts]
    return [*rows, ("All that ran", _operations(whole), "")]


def _flops_sentences(flops: Flops) -> list[str]:
    """What the figures say, and what they leave out."""
    said = []
    if flops.hfu is not None and flops.peak_tflops is not None:
        reached = f"The device reached {share(flops.hfu)} of its peak with all that ran (HFU)"
        if flops.mfu is not None:
            reached += f", {share(flops.mfu)} with what the model needs (MFU)"
        said.append(f"{reached}. Peak: {flops.peak_tflops:,.1f} TFLOP/s, {flops.peak_source}.")
    elif flops.hfu_over_mfu is not None:
        said.append(
            "The device's peak is not known, so HFU and MFU are not either; their ratio needs no "
            "peak. --peak-tflops sets one."
        )
    if flops.uncounted:
        named = ", ".join(visible(name, 60) for name in flops.uncounted)
        said.append(f"Not counted, for want of a formula or of its shapes: {named}.")
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


def _less(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _html(result: Result) -> Mapping[str, Any]:
    flops, memory = result.flops, result.memory
    told_apart = result.verdict != "inconclusive"
    return {
        "ratio": ratio_row(result),
        "flops_rows": _flops_table(flops, told_apart=told_apart) if flops else [],
        "flops_sentences": _flops_sentences(flops) if flops else [],
        "memory_sentences": _memory_sentences(memory) if memory else [],
        "plans": _plan_chart(memory) if memory else None,
    }


def _markdown(result: Result) -> str:
    return markdown_prose(" ".join(_memory_sentences(result.memory))) if result.memory else ""


def _present(result: Result) -> bool:
    counted = result.flops is not None and (result.flops.reason is None or result.flops.peak_tflops)
    return analysed(result) and bool(counted or result.memory)


SECTION = Section(
    anchor="device",
    title="How well the device is used",
    template="device_use.html",
    present=_present,
    html=_html,
    markdown=_markdown,
    link="Device",
)
