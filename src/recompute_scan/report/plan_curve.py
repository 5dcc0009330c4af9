"""The curve of step time against memory, with today's script and the plan on it, as it is drawn."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.result import ActivationPlan, PlanPoint
from recompute_scan.units import ms, size


class CurveMark(Struct, frozen=True):
    """A point of the drawing, in its own units; ``words`` say what it is."""

    x: float
    y: float
    kind: str
    words: str


class CurveDrawing(Struct, frozen=True):
    """The curve in a box of 100 by 100, memory to the right, step time up."""

    line: str
    marks: tuple[CurveMark, ...]
    budget: float | None
    low_bytes: str
    high_bytes: str
    low_ms: str
    high_ms: str


def drawing(plan: ActivationPlan) -> CurveDrawing:
    """The curve with today's script and the plan on it."""
    named = [("today", "Today", plan.today), ("plan", "Plan", _as_measured(plan))]
    points = [*plan.curve, *(point for _, _, point in named)]
    right = max(point.peak_bytes for point in points) * 1.06 or 1.0
    low = min(point.step_ms for point in points)
    high = max(point.step_ms for point in points)
    room = max(high - low, 1e-6 + 0.02 * high)
    bottom, top = low - 0.12 * room, high + 0.12 * room

    def place(point: PlanPoint) -> tuple[float, float]:
        return (
            round(100 * point.peak_bytes / right, 2),
            round(100 * (top - point.step_ms) / (top - bottom), 2),
        )

    corners: list[str] = []
    before: float | None = None
    for x, y in map(place, plan.curve):
        corners += [f"{x},{before}"] if before is not None else []
        corners.append(f"{x},{y}")
        before = y
    marks = [CurveMark(*place(point), "curve", _said("", point)) for point in plan.curve]
    marks += [
        CurveMark(*place(point), kind, _said(f"{name}: ", point)) for kind, name, point in named
    ]
    budget = plan.budget_bytes
    return CurveDrawing(
        " ".join(corners),
        tuple(marks),
        round(100 * budget / right, 2) if budget is not None and budget <= right else None,
        size(0),
        size(right),
        ms(max(bottom, 0.0)),
        ms(top),
    )


def _as_measured(plan: ActivationPlan) -> PlanPoint:
    """The plan's point; its step and memory as measured, where they were."""
    proof = plan.proof
    if proof.step_ms is None or proof.peak_bytes is None:
        return plan.plan
    return replace(plan.plan, step_ms=proof.step_ms, peak_bytes=proof.peak_bytes)


def _said(name: str, point: PlanPoint) -> str:
    again = recomputed(point, " recomputed")
    return f"{name}{ms(point.step_ms)}, {size(point.peak_bytes)}{again and ', '}{again}"


def recomputed(point: PlanPoint, word: str = "") -> str:
    """How many modules are recomputed, and how; nothing of today's."""
    if point.recomputed is None:
        return ""
    said = f"{point.recomputed}{word or ' whole' * bool(point.in_part)}"
    said += f", {point.selective} selectively" if point.selective else ""
    said += f", {point.in_part} in part" if point.in_part else ""
    return f"{said}, {point.offloaded} offloaded" if point.offloaded else said
