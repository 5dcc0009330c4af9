"""The cost as two stacked bars: the step as it is, and the step after the fix.

Positions are per cent of the longer bar; templates draw them.
"""

from __future__ import annotations

from msgspec import Struct

from recompute_scan.report.summary import StepAfter, saving, step_after, total
from recompute_scan.report.words import NEEDED, PART_SHORT, PART_WORDS, first_true
from recompute_scan.result import Result
from recompute_scan.units import ms, share, span

PARTS = ("forward", "recompute", "redundant", "backward", "optimizer", "other")
# A step after the fix that is shorter than the parts that stay, by no more than this share of
# them, is drawn with all of them a little shorter.
_MOST_SHRUNK = 0.1
# What a saving may differ by from the redundant recomputes without a word, as a share of the step.
_SAME = 0.005


class BarPart(Struct, frozen=True):
    """One piece of a bar. ``label`` and ``title`` are empty where they would not fit, ``short``
    where a bar of half a page's width has no room for it.
    """

    kind: str
    title: str
    short: str
    x: float
    width: float
    label: str
    tooltip: str


class Row(Struct, frozen=True):
    """One line of the table under the bars."""

    kind: str
    name: str
    before: str
    before_share: str
    after: str


class CostBars(Struct, frozen=True):
    """Both bars; ``after`` is empty where nothing is saved.

    ``rest`` says where the saving beyond the redundant recomputes comes from, or why less than
    these take is saved.
    """

    summary: str
    rest: str
    saves: bool
    measured: bool
    before: tuple[BarPart, ...]
    after: tuple[BarPart, ...]
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
    step = step_after(result)
    if step is None:
        return None
    # of a step that was measured again, the parts take the same shares
    scale = step.now_ms / cost.step_ms if cost.step_ms > 0 else 1.0
    now = {kind: max(0.0, scale * getattr(cost.breakdown, kind)) for kind in PARTS}
    whole = scale * total(cost.breakdown)
    saves = saving(result) is not None
    then = _after(now, step.after_ms) if saves else {}
    drawn = then or ({"other": step.after_ms} if saves else {})
    longest = max(whole, step.now_ms, step.high_ms if saves else 0.0, 1e-9)
    return CostBars(
        summary=_summary(now, step, whole, first_true(result, NEEDED), saves=saves),
        rest=_rest(now["redundant"], step) if saves else "",
        saves=saves,
        measured=step.measured,
        before=stacked(now, longest),
        after=stacked(drawn, longest),
        low=round(100 * step.low_ms / longest, 3),
        middle=round(100 * step.after_ms / longest, 3),
        high=round(100 * step.high_ms / longest, 3),
        range=span(step.low_ms, step.high_ms),
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
        total_before=ms(step.now_ms),
        total_after=ms(step.after_ms) if saves else "-",
    )


def _after(now: dict[str, float], step_ms: float) -> dict[str, float]:
    """The parts without the redundant recomputes, made to sum to that step.

    What they differ by goes to "other". Where the fix saves more than that holds, the checkpoint's
    own bookkeeping goes with it, which is in all parts: they are shortened alike, by
    :data:`_MOST_SHRUNK` at most. Beyond that they are empty: the step cannot be split.
    """
    kept = {kind: value for kind, value in now.items() if kind not in ("redundant", "other")}
    whole = sum(kept.values())
    rest = step_ms - whole
    if rest >= 0:
        return {**kept, "other": rest}
    if -rest > _MOST_SHRUNK * whole:
        return {}
    return {**{kind: value * step_ms / whole for kind, value in kept.items()}, "other": 0.0}


def _rest(redundant_ms: float, step: StepAfter) -> str:
    """Why the saving is not what the redundant recomputes take; empty where it nearly is."""
    more = step.now_ms - step.after_ms - redundant_ms
    if abs(more) < _SAME * step.now_ms or redundant_ms <= 0:
        return ""
    if more > 0 and step.measured:
        return (
            f"The redundant recomputes take {ms(redundant_ms)} of that; the other {ms(more)} are "
            "what the checkpoint itself does, as far as the times of the steps can tell."
        )
    if more > 0:
        return (
            f"The redundant recomputes take {ms(redundant_ms)}; the other {ms(more)} are what the "
            "checkpoint itself does (saving, hooks, a second backward call), and go with it."
        )
    return (
        f"Of the {ms(redundant_ms)} that redundant recomputes take, {ms(-more)} stay: other work "
        "fills the time, or waits."
    )


def stacked(values: dict[str, float], scale: float) -> tuple[BarPart, ...]:
    """The pieces of one bar in the order of ``values`` (ms by part), per cent of ``scale`` wide."""
    parts, x = [], 0.0
    whole = sum(values.values()) or 1.0
    for kind, value in values.items():
        if value <= 0:
            continue
        width = 100 * value / scale
        text = share(value / whole)
        parts.append(
            BarPart(
                kind=kind,
                title=PART_WORDS[kind] if width >= 14 else "",
                short=PART_SHORT[kind] if width >= 14 else "",
                x=round(x, 3),
                width=round(width, 3),
                label=text if width >= 7 else "",
                tooltip=f"{PART_WORDS[kind]}: {ms(value)}, {text}",
            )
        )
        x += width
    return tuple(parts)


def _summary(
    now: dict[str, float], step: StepAfter, whole: float, needed: str, *, saves: bool
) -> str:
    redundant = now["redundant"]
    if redundant > 0 and saves:
        return (
            f"Of a step of {ms(step.now_ms)}, {ms(redundant)} "
            f"({share(redundant / whole) if whole > 0 else share(None)}) are redundant "
            f"recomputes of work that had been recomputed already; without them a step "
            f"{'was measured at' if step.measured else 'is predicted to take'} "
            f"{ms(step.after_ms)}."
        )
    recomputes = now["recompute"] + redundant
    if recomputes > 0:
        return f"Of a step of {ms(step.now_ms)}, {ms(recomputes)} are {needed}."
    return f"A step takes {ms(step.now_ms)}; no recompute was counted in it."
