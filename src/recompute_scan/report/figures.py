"""Bars, timelines and curves as SVG.

Positions are per cent of the drawing's width, or of the longer bar. Every lane of a timeline starts
at the left edge on one common scale, so that the same operators line up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from recompute_scan.report import words
from recompute_scan.report.summary import StepAfter, saving, step_after, total
from recompute_scan.report.templating import visible
from recompute_scan.report.words import NEEDED, PART_SHORT, PART_WORDS, family_words, first_true
from recompute_scan.result import (
    MemoryPlan,
    PlanPoint,
    Proof,
    ProofLane,
    ProofOp,
    Result,
)
from recompute_scan.units import ms, plural, share, size, span

PARTS = tuple(PART_WORDS)
# A step after the fix that is shorter than the parts that stay, by no more than this share of
# them, is drawn with all of them a little shorter.
_MOST_SHRUNK = 0.1
# A saving this near to the redundant recomputes is not explained; a share of the step.
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
    recomputes: str
    redundant: str


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
        recomputes=ms(scale * cost.recompute_ms),
        redundant=ms(scale * cost.redundant_recompute_ms),
    )


def _after(now: dict[str, float], step_ms: float) -> dict[str, float]:
    """The parts without the redundant recomputes, made to sum to that step.

    What stays of their time goes to "other". Where the fix saves more than their time, the
    checkpoint's own bookkeeping goes with it, which is in all parts: they are shortened alike, by
    :data:`_MOST_SHRUNK` at most. Beyond that they are empty: the step cannot be split.
    """
    kept = {kind: value for kind, value in now.items() if kind != "redundant"}
    whole = sum(kept.values())
    if step_ms >= whole:
        return {**kept, "other": kept["other"] + step_ms - whole}
    if whole - step_ms > _MOST_SHRUNK * whole:
        return {}
    return {kind: value * step_ms / whole for kind, value in kept.items()}


def _rest(redundant_ms: float, step: StepAfter) -> str:
    """Why the saving is not what the redundant recomputes take; empty where it nearly is."""
    more = step.now_ms - step.after_ms - redundant_ms
    if abs(more) < _SAME * step.now_ms or redundant_ms <= 0:
        return ""
    if more > 0 and step.measured:
        return (
            f"The redundant recomputes take {ms(redundant_ms)} of that; the other {ms(more)} are "
            "an estimate of the checkpoint's own work, from the step times."
        )
    if more > 0:
        return (
            f"The redundant recomputes take {ms(redundant_ms)}; the other {ms(more)} are what the "
            "checkpoint itself does (saving, hooks, a second backward call), or what the one that "
            "stays does not run again, and go with it."
        )
    return (
        f"Of the {ms(redundant_ms)} that redundant recomputes take, {ms(-more)} stay: other work "
        "or waiting fills the time."
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
            "recomputes of work that had been recomputed already."
        )
    recomputes = now["recompute"] + redundant
    if recomputes > 0:
        return f"Of a step of {ms(step.now_ms)}, {ms(recomputes)} are {needed}."
    return f"A step takes {ms(step.now_ms)}; no recompute was counted in it."


# Enough to see a block's shape; beyond it boxes are thinner than a line and weigh megabytes.
MOST_BOXES = 600
COLOURS = 6
# The widest a backward lane may be, in lengths of the longest other lane.
MOST_BACKWARD = 2.2
# By a part of the family's name; the last colour is for all others.
_COLOUR_OF = (
    ("attention", 1),
    ("gemm", 0),
    ("conv", 0),
    ("norm", 2),
    ("softmax", 2),
    ("activation", 3),
    ("dropout", 3),
    ("copy", 4),
)
_ROWS = 3
_ROW_HEIGHT = 32
_LANE_HEAD = 23
_LANE_GAP = 14
_THINNEST = 0.1  # per cent of the width
# A character is taken for 0.72 % of the width: 6.5 px of 900.
_CHARACTER = 0.72
_LANE_WORDS = {
    "forward": "The forward pass",
    "recompute": "Run again: the one recompute that checkpointing needs",
    "redundant": "Run again: redundant, the same work for nothing",
    "backward": "The gradients",
}


class Box(Struct, frozen=True):
    """One operator: ``x`` and ``width`` in per cent, ``y`` in px; ``label`` is what fits of it.

    ``op`` is the same number for the same operator in every lane.
    """

    x: float
    width: float
    y: int
    colour: int
    name: str
    label: str
    op: int
    time: str


class Lane(Struct, frozen=True):
    """One run of the block, drawn from ``y`` on; ``width`` is its length in per cent."""

    name: str
    title: str
    begins: str
    kind: str
    y: int
    height: int
    width: float
    boxes: tuple[Box, ...]
    left_out: int


class Timeline(Struct, frozen=True):
    """Everything that the proof section draws and lists.

    ``operators`` are of the block: name, family, and the times in the lanes but for the backward.
    """

    block: str
    step: int
    summary: str
    lanes: tuple[Lane, ...]
    height: int
    ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[int, str], ...]
    operators: list[tuple[str, str, list[str]]]
    left_out: int


def timeline(result: Result) -> Timeline | None:
    """The drawing of ``result.proof``, or ``None`` where there is nothing to draw."""
    proof = result.proof
    if proof is None or not proof.lanes:
        return None
    longest = _scale(proof)
    colours = family_colours(proof)
    step_start = next((step.start_us for step in result.steps if step.index == proof.step), None)
    numbers: dict[tuple[str, int], int] = {}
    lanes, y = [], 0
    for lane in proof.lanes:
        drawn = _lane(lane, y, longest, colours, numbers, step_start)
        lanes.append(drawn)
        y += drawn.height + _LANE_GAP
    block = _block(result, proof)
    return Timeline(
        block=block,
        step=proof.step,
        summary=_summary_side_by_side(block, proof),
        lanes=tuple(lanes),
        height=y + 24,
        ticks=_ticks(longest),
        legend=_legend(colours),
        operators=_operators(proof),
        left_out=sum(lane.left_out for lane in lanes),
    )


def _block(result: Result, proof: Proof) -> str:
    region = next((item for item in result.regions if item.ordinal == proof.region), None)
    return (region.module if region else None) or f"block {proof.region}"


def _scale(proof: Proof) -> float:
    """How many µs the drawing is wide.

    A backward lane may be far longer than the runs to compare (it can enclose the recomputes);
    it is cut rather than let it press them into a corner.
    """
    longest = max(1e-3, *(lane.duration_us for lane in proof.lanes))
    runs = [lane.duration_us for lane in proof.lanes if lane.kind != "backward"]
    return min(longest, MOST_BACKWARD * max(runs)) if runs and max(runs) > 0 else longest


def family_colours(proof: Proof) -> dict[str, int]:
    """The colour number of each family, the same in every report; most time spent first."""
    spent: dict[str, float] = {}
    for lane in proof.lanes:
        for op in lane.ops:
            spent[op.family] = spent.get(op.family, 0.0) + op.duration_us
    ordered = sorted(spent, key=lambda family: (-spent[family], family))
    return {
        family: next((number for part, number in _COLOUR_OF if part in family), COLOURS - 1)
        for family in ordered
    }


def _legend(colours: dict[str, int]) -> tuple[tuple[int, str], ...]:
    names: dict[int, list[str]] = {}
    for family, colour in colours.items():
        names.setdefault(colour, []).append(visible(family_words(family), 30))
    shown = {colour: ", ".join(found[:4]) for colour, found in names.items()}
    return tuple(
        (colour, text + (", …" if len(names[colour]) > 4 else ""))
        for colour, text in sorted(shown.items())
    )


def _lane(
    lane: ProofLane,
    y: int,
    longest: float,
    colours: dict[str, int],
    numbers: dict[tuple[str, int], int],
    step_start: float | None,
) -> Lane:
    inside = [one for one in numbered(lane.ops) if one[1].start_us < lane.start_us + longest]
    drawn = sorted(inside, key=lambda one: (-one[1].duration_us, one[1].start_us))[:MOST_BOXES]
    row_ends: list[float] = []
    boxes = []
    for key, op in sorted(drawn, key=lambda one: (one[1].start_us, -one[1].duration_us)):
        number = numbers.setdefault(key, len(numbers))
        row = next((n for n, end in enumerate(row_ends) if op.start_us >= end - 1e-3), None)
        if row is None:
            row = len(row_ends) if len(row_ends) < _ROWS else _ROWS - 1
            row_ends += [0.0] * (row + 1 - len(row_ends))
        row_ends[row] = max(row_ends[row], op.start_us + op.duration_us)
        top = y + _LANE_HEAD + row * _ROW_HEIGHT
        boxes.append(_box(op, lane, longest, number, colours, _op_label, top))
    begins = ""
    if step_start is not None:
        begins = f"{ms((lane.start_us - step_start) / 1000)} into the step"
    return Lane(
        name=visible(lane.label, 40),
        title=_title(lane, longest),
        begins=begins,
        kind=lane.kind,
        y=y,
        height=_LANE_HEAD + max(1, len(row_ends)) * _ROW_HEIGHT,
        width=round(min(100.0, 100 * lane.duration_us / longest), 3),
        boxes=tuple(boxes),
        left_out=len(inside) - len(drawn),
    )


def _title(lane: ProofLane, longest: float) -> str:
    # in words as well, since colour alone does not reach everyone
    cut = ", cut at the right edge" if lane.duration_us > 1.001 * longest else ""
    label = visible(lane.label, 60)
    return f"{_LANE_WORDS[lane.kind]} ({label}): {ms(lane.duration_us / 1000)}{cut}"


def _box(
    op: ProofOp,
    lane: ProofLane,
    longest: float,
    number: int,
    colours: dict[str, int],
    label: Callable[[ProofOp, float], str],
    y: int = 0,
) -> Box:
    """The box of an operator; ``label`` gives what fits into its width."""
    x = min(max(100 * (op.start_us - lane.start_us) / longest, 0.0), 100.0)
    width = min(max(100 * op.duration_us / longest, _THINNEST), max(100 - x, _THINNEST))
    return Box(
        x=round(x, 2),
        width=round(width, 2),
        y=y,
        colour=colours[op.family],
        name=short_name(op),
        label=label(op, width),
        op=number,
        time=ms(op.duration_us / 1000),
    )


def _op_label(op: ProofOp, width: float) -> str:
    room = int(width / _CHARACTER) - 1
    family = visible(family_words(op.family), 40)
    fitting = (text for text in (short_name(op), family) if len(text) <= room)
    return next(fitting, f"{family[: room - 1]}…" if room >= 5 else "")


def _summary_side_by_side(block: str, proof: Proof) -> str:
    again = [lane for lane in proof.lanes if lane.kind in ("recompute", "redundant")]
    original = next((lane for lane in proof.lanes if lane.kind == "forward"), None)
    name = visible(block, 60)
    if original is None:
        return f"The runs of {name} in step {proof.step}, one under another."
    number = plural(len(original.ops), "operator")
    head = f"{name} ran {number} in the forward pass of step {proof.step}"
    if not again:
        return f"{head}, and the backward pass ran no operator of it again."
    counts = " and ".join(str(len(lane.ops)) for lane in again)
    if len(again) == 1:
        return f"{head}, and {counts} of them once more in the backward pass."
    text = f"{head}, and again {len(again)} times in the backward pass ({counts} of them)"
    if any(lane.kind == "redundant" for lane in again):
        return f"{text}: one recompute is needed, the rest is redundant."
    return f"{text}."


def _ticks(longest_us: float) -> tuple[tuple[float, str], ...]:
    """Round numbers along the scale, four to ten of them: per cent and label."""
    rough = longest_us / 5000
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    found = []
    for number in range(11):
        at = 1000 * step * number / longest_us * 100
        if at > 97:
            break
        found.append((round(at, 3), f"{step * number:g} ms"))
    return tuple(found)


def _operators(proof: Proof) -> list[tuple[str, str, list[str]]]:
    """The forward-side lanes operator by operator; the n-th call of a name meets the n-th."""
    lanes = [lane for lane in proof.lanes if lane.kind != "backward"]
    rows: dict[tuple[str, int], list[str]] = {}
    families: dict[tuple[str, int], str] = {}
    for place, lane in enumerate(lanes):
        for key, op in numbered(lane.ops):
            cells = rows.setdefault(key, ["-"] * len(lanes))
            cells[place] = ms(op.duration_us / 1000)
            families.setdefault(key, op.family)
    return [
        (visible(key[0]), visible(family_words(families[key]), 40), cells)
        for key, cells in rows.items()
    ]


def numbered(ops: Iterable[ProofOp]) -> list[tuple[tuple[str, int], ProofOp]]:
    """Each operator with its name and the number of its call: what is the same in every lane."""
    seen: dict[str, int] = {}
    found = []
    for op in ops:
        seen[op.name] = seen.get(op.name, 0) + 1
        found.append(((op.name, seen[op.name]), op))
    return found


def short_name(op: ProofOp) -> str:
    """The last part of ``aten::mm`` or ``Linear.forward``, the part in which operators differ."""
    return visible(op.name.rpartition("::")[2], 40)


def family_table(proof: Proof) -> list[tuple[str, list[str]]]:
    """Calls and time of each family in each lane: what the drawing says, in numbers."""
    table = []
    for family in family_colours(proof):
        cells = []
        for lane in proof.lanes:
            ops = [op for op in lane.ops if op.family == family]
            spent = sum(op.duration_us for op in ops) / 1000
            cells.append(f"{plural(len(ops), 'call')}, {ms(spent)}" if ops else "-")
        table.append((visible(family_words(family), 40), cells))
    return table


MOST_LANES = 4
# Boxes thinner than this are not drawn here, per cent; the proof has them all.
_PICTURE_THINNEST = 0.25
# A character of a label is taken for so much of the width, per cent.
_PICTURE_CHARACTER = 1.05
# The colours of the page's style sheet in its light theme, for a drawing that has none.
PART_FILLS = {
    "forward": "#dbe2ea",
    "recompute": "#fbe6b0",
    "redundant": "#f7c3bd",
    "backward": "#c6cfda",
    "optimizer": "#e2e7ed",
    "other": "#eef1f4",
}
FAMILY_FILLS = ("#bcd5f7", "#a9e0e0", "#e8d2bf", "#dccff0", "#cfe6c6", "#e1e4e8")
_WORDS = {"forward": "forward pass", "recompute": "recompute", "redundant": "redundant recompute"}


class Picture(Struct, frozen=True):
    """Either part may be missing: no bars, or no runs."""

    bars: CostBars | None
    block: str
    runs: tuple[Lane, ...]
    left_out: int
    caption: str = ""


def picture(result: Result) -> Picture | None:
    """The drawing of the first screen; ``None`` where there is nothing to draw."""
    bars = cost_bars(result)
    proof = result.proof
    lanes = [lane for lane in proof.lanes if lane.kind in _WORDS] if proof else []
    again = any(lane.kind != "forward" for lane in lanes)
    if proof is None or not again:
        return Picture(bars, "", (), 0) if bars else None
    longest = max(1e-3, *(lane.duration_us for lane in lanes))
    numbers: dict[tuple[str, int], int] = {}
    return Picture(
        bars,
        visible(_block(result, proof), 40),
        tuple(_run(lane, proof, longest, numbers) for lane in lanes[:MOST_LANES]),
        len(lanes[MOST_LANES:]),
        _caption(lanes),
    )


def _caption(lanes: list[ProofLane]) -> str:
    """The operators that the lanes share: early stop leaves out the last ones, and a checkpoint
    inside the block keeps some.
    """
    first, *others = ([key for key, _ in numbered(lane.ops)] for lane in lanes)
    if all(other == first for other in others):
        return words.SAME_LANES
    again = dict.fromkeys(len(set(other) & set(first)) for other in others)
    said = " and ".join(map(str, again)) + (", lane by lane" if len(again) > 1 else "")
    return f"Of {plural(len(first), 'operator')} in the first lane, {said} run again."


def _run(
    lane: ProofLane, proof: Proof, longest: float, numbers: dict[tuple[str, int], int]
) -> Lane:
    colours = family_colours(proof)
    name = _WORDS[lane.kind]
    boxes = tuple(
        _box(op, lane, longest, numbers.setdefault(key, len(numbers)), colours, _family_label)
        for key, op in numbered(lane.ops)
        if 100 * op.duration_us / longest >= _PICTURE_THINNEST
    )
    title = f"{name.capitalize()}: {ms(lane.duration_us / 1000)}"
    width = round(100 * lane.duration_us / longest, 2)
    return Lane(name, title, "", lane.kind, 0, 0, width, boxes, 0)


def _family_label(op: ProofOp, width: float) -> str:
    family = visible(family_words(op.family), 20)
    fits = len(family) * _PICTURE_CHARACTER + 1 < width and op.family != "other"
    return family if fits else ""


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


def curve_drawing(
    curve: Sequence[PlanPoint | MemoryPlan],
    marks: Sequence[tuple[PlanPoint | MemoryPlan, str, str]],
    budget: int | None,
) -> CurveDrawing:
    """Step time against memory: the points of a line, and the points to mark, each with its kind
    and its words. The budget is in bytes.
    """
    points = [point for point, _, _ in marks]
    right = max(point.peak_bytes for point in points) * 1.06 or 1.0
    low = min(point.step_ms for point in points)
    high = max(point.step_ms for point in points)
    room = max(high - low, 1e-6 + 0.02 * high)
    bottom, top = low - 0.12 * room, high + 0.12 * room

    def place(point: PlanPoint | MemoryPlan) -> tuple[float, float]:
        return (
            round(100 * point.peak_bytes / right, 2),
            round(100 * (top - point.step_ms) / (top - bottom), 2),
        )

    corners: list[str] = []
    before: float | None = None
    for x, y in map(place, curve):
        corners += [f"{x},{before}"] if before is not None else []
        corners.append(f"{x},{y}")
        before = y
    return CurveDrawing(
        " ".join(corners),
        tuple(CurveMark(*place(point), kind, said) for point, kind, said in marks),
        round(100 * budget / right, 2) if budget is not None and budget <= right else None,
        size(0),
        size(right),
        ms(max(bottom, 0.0)),
        ms(top),
    )
