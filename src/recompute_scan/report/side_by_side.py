"""One block side by side: where each box of the timeline is, and the tables beside it.

Every lane starts at the left edge on one common scale, so that the same operators line
up. Positions are percentages of the drawing's width; nothing here knows pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from recompute_scan.report.escape import visible
from recompute_scan.report.words import family_words
from recompute_scan.result import Proof, ProofLane, ProofOp, Result
from recompute_scan.units import ms, plural

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
    tooltip: str
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


class OpRow(Struct, frozen=True):
    """One operator of the block and how long it took in each lane, in lane order."""

    name: str
    family: str
    durations: tuple[str, ...]


class Timeline(Struct, frozen=True):
    """Everything that the proof section draws and lists."""

    block: str
    step: int
    summary: str
    lanes: tuple[Lane, ...]
    height: int
    ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[int, str], ...]
    operators: tuple[OpRow, ...]
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
    region = next((item for item in result.regions if item.ordinal == proof.region), None)
    block = (region.module if region else None) or f"block {proof.region}"
    return Timeline(
        block=block,
        step=proof.step,
        summary=_summary(block, proof),
        lanes=tuple(lanes),
        height=y + 24,
        ticks=_ticks(longest),
        legend=_legend(colours),
        operators=_operators(proof),
        left_out=sum(lane.left_out for lane in lanes),
    )


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
    return {family: _colour(family) for family in ordered}


def _colour(family: str) -> int:
    return next((number for pattern, number in _COLOUR_OF if pattern in family), COLOURS - 1)


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
        boxes.append(_box(op, number, lane, top, longest, colours))
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
    # said in words as well, since colour alone does not reach everyone
    cut = ", cut at the right edge" if lane.duration_us > 1.001 * longest else ""
    label = visible(lane.label, 60)
    return f"{_LANE_WORDS[lane.kind]} ({label}): {ms(lane.duration_us / 1000)}{cut}"


def _box(
    op: ProofOp, number: int, lane: ProofLane, y: int, longest: float, colours: dict[str, int]
) -> Box:
    x = min(max(100 * (op.start_us - lane.start_us) / longest, 0.0), 100.0)
    width = min(max(100 * op.duration_us / longest, _THINNEST), max(100 - x, _THINNEST))
    short = short_name(op)
    room = int(width / _CHARACTER) - 1
    family = visible(family_words(op.family), 40)
    fitting = (text for text in (short, family) if len(text) <= room)
    label = next(fitting, f"{family[: room - 1]}…" if room >= 5 else "")
    at = (op.start_us - lane.start_us) / 1000
    tooltip = f"{visible(op.name)} ({family}): {ms(op.duration_us / 1000)}"
    return Box(
        x=round(x, 3),
        width=round(width, 3),
        y=y,
        colour=colours[op.family],
        name=short,
        label=label,
        tooltip=f"{tooltip}, at {ms(at)}",
        op=number,
        time=ms(op.duration_us / 1000),
    )


def _summary(block: str, proof: Proof) -> str:
    again = [lane for lane in proof.lanes if lane.kind in ("recompute", "redundant")]
    original = next((lane for lane in proof.lanes if lane.kind == "forward"), None)
    name = visible(block, 60)
    if original is None:
        return f"The runs of {name} in step {proof.step}, one under another."
    number = plural(len(original.ops), "operator")
    head = f"{name} ran {number} in the forward pass of step {proof.step}"
    if not again:
        return f"{head}, and none of them again in the backward pass."
    counts = " and ".join(str(len(lane.ops)) for lane in again)
    if len(again) == 1:
        return f"{head}, and {counts} of them once more in the backward pass."
    text = f"{head}, and {len(again)} times more in the backward pass ({counts} of them)"
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


def _operators(proof: Proof) -> tuple[OpRow, ...]:
    """The forward-side lanes operator by operator; the n-th call of a name meets the n-th."""
    lanes = [lane for lane in proof.lanes if lane.kind != "backward"]
    rows: dict[tuple[str, int], list[str]] = {}
    families: dict[tuple[str, int], str] = {}
    for place, lane in enumerate(lanes):
        for key, op in numbered(lane.ops):
            cells = rows.setdefault(key, ["-"] * len(lanes))
            cells[place] = ms(op.duration_us / 1000)
            families.setdefault(key, op.family)
    return tuple(
        OpRow(visible(key[0]), visible(family_words(families[key]), 40), tuple(cells))
        for key, cells in rows.items()
    )


def numbered(ops: Iterable[ProofOp]) -> list[tuple[tuple[str, int], ProofOp]]:
    """Each operator with its name and the number of its call: what is the same in every lane."""
    seen: dict[str, int] = {}
    found = []
    for op in ops:
        seen[op.name] = seen.get(op.name, 0) + 1
        found.append(((op.name, seen[op.name]), op))
    return found


def short_name(op: ProofOp) -> str:
    """The last part of ``aten::mm`` or ``Linear.forward``, which tells operators apart."""
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
