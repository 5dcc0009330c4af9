"""The picture of the first screen: the step now and after, and one block run by run.

Positions are per cent of the drawing's width; the template knows pixels.
"""

from __future__ import annotations

from msgspec import Struct

from recompute_scan.report import words
from recompute_scan.report.bars import CostBars, cost_bars
from recompute_scan.report.escape import visible
from recompute_scan.report.side_by_side import family_colours, numbered, short_name
from recompute_scan.report.words import family_words
from recompute_scan.result import Proof, ProofLane, Result
from recompute_scan.units import ms, plural

MOST_LANES = 4
# Boxes thinner than this are not drawn here, per cent; the proof has them all.
_THINNEST = 0.25
# A character of a label is taken for so much of the width, per cent.
_CHARACTER = 1.05
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


class PictureMark(Struct, frozen=True):
    """One operator of a lane; ``label`` is its family where that fits.

    ``op`` is the same number for the same operator in every lane.
    """

    x: float
    width: float
    colour: int
    label: str
    name: str
    time: str
    op: int


class LaneRun(Struct, frozen=True):
    """One run of the block, as a lane."""

    name: str
    kind: str
    title: str
    width: float
    marks: tuple[PictureMark, ...]


class Picture(Struct, frozen=True):
    """Either part may be missing: no bars, or no runs."""

    bars: CostBars | None
    block: str
    runs: tuple[LaneRun, ...]
    left_out: int
    caption: str = ""


def picture(result: Result) -> Picture | None:
    """What the first screen draws; ``None`` where there is nothing to draw."""
    bars = cost_bars(result)
    proof = result.proof
    lanes = [lane for lane in proof.lanes if lane.kind in _WORDS] if proof else []
    again = any(lane.kind != "forward" for lane in lanes)
    if proof is None or not again:
        return Picture(bars, "", (), 0) if bars else None
    region = next((item for item in result.regions if item.ordinal == proof.region), None)
    block = (region.module if region else None) or f"block {proof.region}"
    longest = max(1e-3, *(lane.duration_us for lane in lanes))
    numbers: dict[tuple[str, int], int] = {}
    return Picture(
        bars,
        visible(block, 40),
        tuple(_run(lane, proof, longest, numbers) for lane in lanes[:MOST_LANES]),
        len(lanes[MOST_LANES:]),
        _caption(lanes),
    )


def _caption(lanes: list[ProofLane]) -> str:
    """What the lanes have in common, by the operators in them: early stop leaves out the last ones,
    and a checkpoint inside the block keeps some.
    """
    first, *others = ([key for key, _ in numbered(lane.ops)] for lane in lanes)
    if all(other == first for other in others):
        return words.SAME_LANES
    again = dict.fromkeys(len(set(other) & set(first)) for other in others)
    said = " and ".join(map(str, again)) + (", lane by lane" if len(again) > 1 else "")
    return f"Of {plural(len(first), 'operator')} in the first lane, {said} run again."


def _run(
    lane: ProofLane, proof: Proof, longest: float, numbers: dict[tuple[str, int], int]
) -> LaneRun:
    colours = family_colours(proof)
    marks = []
    for key, op in numbered(lane.ops):
        x = max(0.0, 100 * (op.start_us - lane.start_us) / longest)
        width = min(100 * op.duration_us / longest, 100 - x)
        if width < _THINNEST:
            continue
        family = visible(family_words(op.family), 20)
        fits = len(family) * _CHARACTER + 1 < width and op.family != "other"
        marks.append(
            PictureMark(
                x=round(x, 2),
                width=round(width, 2),
                colour=colours[op.family],
                label=family if fits else "",
                name=short_name(op),
                time=ms(op.duration_us / 1000),
                op=numbers.setdefault(key, len(numbers)),
            )
        )
    return LaneRun(
        _WORDS[lane.kind],
        lane.kind,
        f"{_WORDS[lane.kind].capitalize()}: {ms(lane.duration_us / 1000)}",
        round(100 * lane.duration_us / longest, 2),
        tuple(marks),
    )
