"""The cost as two stacked bars: the step as it is, and the step after the fix.

Positions are per cent of the longer bar; the drawing itself is in ``templates/cost.html``.
"""

from __future__ import annotations

from dataclasses import dataclass

from recompute_scan.report.summary import StepAfter, saving, step_after, total
from recompute_scan.report.words import PART_WORDS
from recompute_scan.result import Cost, Result
from recompute_scan.units import ms, share

PARTS = ("forward", "recompute", "redundant", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Part:
    """One piece of a bar. ``label`` and ``title`` are empty where they would not fit."""

    kind: str
    title: str
    x: float
    width: float
    label: str
    tooltip: str


@dataclass(frozen=True)
class Row:
    """One line of the table under the bars."""

    kind: str
    name: str
    before: str
    before_share: str
    after: str


@dataclass(frozen=True)
class CostBars:
    """Both bars; ``after`` is empty where nothing is saved, or what is saved cannot be split."""

    summary: str
    saves: bool
    measured: bool
    before: tuple[Part, ...]
    after: tuple[Part, ...]
    low: float
    middle: float
    high: float
    range: str
    table: tuple[Row, ...]
    total_before: str
    total_after: str


def cost_bars(result: Result) -> CostBars | None:
    """The two bars and their table; ``None`` where the parts of a step are not known."""
    cost = result.cost
    if cost is None or result.verdict == "inconclusive":
        return None
    now = {kind: max(0.0, float(getattr(cost.breakdown, kind))) for kind in PARTS}
    whole = total(cost.breakdown)
    step = step_after(result)
    if step is None:
        return None
    saves = saving(result) is not None
    then = _after(now, step.after_ms) if saves else {}
    scale = max(whole, cost.step_ms, step.high_ms if saves else 0.0, 1e-9)
    return CostBars(
        summary=_summary(cost, step, whole, saves=saves),
        saves=saves,
        measured=step.measured,
        before=stacked(now, scale),
        after=stacked(then, scale),
        low=round(100 * step.low_ms / scale, 3),
        middle=round(100 * step.after_ms / scale, 3),
        high=round(100 * step.high_ms / scale, 3),
        range=f"{ms(step.low_ms)} to {ms(step.high_ms)}",
        table=tuple(
            Row(
                kind,
                PART_WORDS[kind],
                ms(now[kind]),
                share(now[kind] / whole) if whole > 0 else share(None),
                ms(then[kind]) if kind in then else "-",
            )
            for kind in PARTS
        ),
        total_before=ms(cost.step_ms),
        total_after=ms(step.after_ms) if saves else "-",
    )


def _after(now: dict[str, float], step_ms: float) -> dict[str, float]:
    """The parts without the redundant recomputes; what they differ by from that step goes to
    "other".

    The fix may save less than the redundant recomputes (overlap) or more (collectives), so parts
    that do not fit into it at all are left undrawn rather than invented.
    """
    kept = {kind: value for kind, value in now.items() if kind not in ("redundant", "other")}
    rest = step_ms - sum(kept.values())
    return {**kept, "other": rest} if rest >= 0 else {}


def stacked(values: dict[str, float], scale: float) -> tuple[Part, ...]:
    """The pieces of one bar in the order of ``values`` (ms by part), per cent of ``scale`` wide."""
    parts, x = [], 0.0
    whole = sum(values.values()) or 1.0
    for kind, value in values.items():
        if value <= 0:
            continue
        width = 100 * value / scale
        text = share(value / whole)
        parts.append(
            Part(
                kind=kind,
                title=PART_WORDS[kind] if width >= 12 else "",
                x=round(x, 3),
                width=round(width, 3),
                label=text if width >= 7 else "",
                tooltip=f"{PART_WORDS[kind]}: {ms(value)}, {text}",
            )
        )
        x += width
    return tuple(parts)


def _summary(cost: Cost, step: StepAfter, whole: float, *, saves: bool) -> str:
    parts = cost.breakdown
    if parts.redundant > 0 and saves:
        return (
            f"Of a step of {ms(cost.step_ms)}, {ms(parts.redundant)} "
            f"({share(parts.redundant / whole) if whole > 0 else share(None)}) are redundant "
            f"recomputes of work that had been recomputed already; without them a step "
            f"{'was measured at' if step.measured else 'is predicted to take'} "
            f"{ms(step.after_ms)}."
        )
    recomputes = parts.recompute + parts.redundant
    if recomputes > 0:
        return (
            f"Of a step of {ms(cost.step_ms)}, {ms(recomputes)} are recomputes that "
            f"checkpointing needs to save memory."
        )
    return f"A step takes {ms(cost.step_ms)}; no recompute was counted in it."
