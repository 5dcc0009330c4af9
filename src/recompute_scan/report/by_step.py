"""Blocks by steps: how often each block ran again in each step, where steps differ.

Blocks alike in every step share a row, and steps alike in every block a column, so that two
hundred layers and a hundred steps stay a table that a person can read, with nothing lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from recompute_scan.report.groups import block_groups, ranges
from recompute_scan.result import Result
from recompute_scan.units import plural

MOST_ROWS = 60
MOST_COLUMNS = 40

_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True)
class ByStep:
    """The strip: a row for each kind of block, a column for each kind of step.

    ``sentence`` says the whole where all steps agree, and what was put together where not.
    ``rows`` hold a label that is not escaped yet and a number a column, ``None`` for not known.
    """

    sentence: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, tuple[float | None, ...]], ...] = ()


def by_step(result: Result) -> ByStep | None:
    """The strip; ``None`` where the result does not hold the numbers of single steps."""
    regions = result.regions
    places = [place for place, step in enumerate(result.steps) if step.complete]
    if not regions or not places:
        return None
    if any(len(region.replays_by_step) != len(result.steps) for region in regions):
        return None
    shown = [tuple(_rounded(r.replays_by_step[place]) for place in places) for r in regions]
    whole = plural(len(places), "whole step")
    if all(len(set(values)) == 1 for values in shown):
        if len(places) == 1:
            return None
        return ByStep(f"In each of the {whole} every block ran again the same number of times.")
    rows = _alike(shown)
    steps = _alike(list(zip(*shown, strict=True)))
    sentence = (
        f"{plural(len(regions), 'block')} in {whole}: the steps differ. Blocks that are alike in "
        "every step share a row, steps that are alike in every block a column."
    )
    if len(rows) > MOST_ROWS or len(steps) > MOST_COLUMNS:
        sentence += (
            f" {plural(max(0, len(rows) - MOST_ROWS), 'row')} and "
            f"{plural(max(0, len(steps) - MOST_COLUMNS), 'column')} more stand in the JSON."
        )
    steps = steps[:MOST_COLUMNS]
    return ByStep(
        sentence,
        columns=tuple(ranges([result.steps[places[place]].index for place in of]) for of in steps),
        rows=tuple(
            (_label(result, of), tuple(shown[of[0]][same[0]] for same in steps))
            for of in rows[:MOST_ROWS]
        ),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _alike(keys: Sequence[_K]) -> list[list[int]]:
    """Places of equal keys together, in order of the first of each."""
    groups: dict[_K, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _label(result: Result, places: Sequence[int]) -> str:
    groups = block_groups(result.regions[place] for place in places)
    more = f" and {len(groups) - 3} more kinds" if len(groups) > 3 else ""
    return ", ".join(group.label for group in groups[:3]) + more
