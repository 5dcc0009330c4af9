"""How well the device is used: its arithmetic and its memory, in words for every rendering."""

from __future__ import annotations

from dataclasses import dataclass

from recompute_scan.report.escape import visible
from recompute_scan.result import Flops, Hta, Memory, MemoryPlan, Result
from recompute_scan.units import UNKNOWN, ms, pct, plural, share, size, times

_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
HTA_COLUMNS = ("HTA", "recompute-scan")
HTA_SAYS = (
    "Over all recorded steps; every kernel that is no communication and no copy is computing."
)
_HEALTHY = "1.00 without checkpointing, about 1.33 with every layer recomputed once, 1.67 twice"
# The drawing of time against memory: height in pixels, and what is left free of the width, in %.
_TOP, _BOTTOM = 24, 176
_LEFT, _RIGHT = 4.0, 96.0


@dataclass(frozen=True)
class PlanPoint:
    """One plan in the drawing of time against memory; x in per cent of the width, y in pixels."""

    x: float
    y: float
    chosen: bool
    tooltip: str


@dataclass(frozen=True)
class PlanChart:
    """The plans from left (least memory) to right; ``budget`` is where memory ends, in per cent."""

    points: tuple[PlanPoint, ...]
    budget: float | None
    summary: str


def plan_chart(memory: Memory) -> PlanChart | None:
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
        PlanPoint(
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


def memory_sentences(memory: Memory) -> list[str]:
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


def ratio_row(result: Result) -> tuple[str, str] | None:
    """HFU over MFU as a number and what to hold beside it; ``None`` where it is not known."""
    flops = result.flops
    if flops is None or flops.hfu_over_mfu is None:
        return None
    reached = ""
    if flops.hfu is not None and flops.mfu is not None:
        reached = f"HFU {share(flops.hfu)}, MFU {share(flops.mfu)} of the peak; "
    return times(flops.hfu_over_mfu), reached + _HEALTHY


def flops_table(flops: Flops, *, told_apart: bool = True) -> list[tuple[str, str, str]]:
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
    rows = [(name, operations(value), share((value or 0.0) / whole)) for name, value in parts]
    return [*rows, ("All that ran", operations(whole), "")]


def flops_sentences(flops: Flops) -> list[str]:
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


def operations(value: float | None) -> str:
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


def hta_rows(hta: Hta) -> list[tuple[str, str, str]]:
    """What Holistic Trace Analysis found, and what recompute-scan counts of the same."""
    own = hta.own
    parts = [
        ("Idle", hta.idle_pct, own.idle_pct if own else None),
        ("Computing", hta.compute_pct, own.compute_pct if own else None),
        ("Busy without computing", hta.non_compute_pct, own.non_compute_pct if own else None),
        ("Communication beside computation", hta.overlap_pct, own.overlap_pct if own else None),
    ]
    whole = ms(own.kernel_time_ms) if own else ""
    return [
        ("GPU time, first kernel to last", ms(hta.kernel_time_ms), whole),
        *((name, pct(theirs), pct(ours) if own else "") for name, theirs, ours in parts),
        *(
            (f"Kernels: {visible(kind, 60)}", pct(part), "")
            for kind, part in list(hta.kernel_types.items())[:20]
        ),
    ]


def hta_title(result: Result) -> str:
    """``Holistic Trace Analysis``, with whose breakdown it is where there are several."""
    if result.hta is None or result.hta.rank is None or len(result.ranks) < 2:
        return "Holistic Trace Analysis"
    return f"Holistic Trace Analysis of rank {result.hta.rank}"
