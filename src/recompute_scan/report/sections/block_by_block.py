"""Block by block: how often each ran again, and in which steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from recompute_scan.report.escape import markdown_code, visible
from recompute_scan.report.groups import BlockGroup, block_groups, ranges
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section, analysed
from recompute_scan.result import Checkpoint, Region, Result
from recompute_scan.units import ms, plural, times

# Rows shown before the table folds blocks that are like one already shown.
MOST_ROWS = 60
MOST_FOLDED = 2000
# Kinds of block, and of step, in the table of blocks by steps.
MOST_KINDS = 60
MOST_COLUMNS = 40
_MOST_GROUPS_TEXT = 8
_MOST_GROUPS_MARKDOWN = 12
# From here on a block ran again more often than once.
_MORE_THAN_ONCE = 1.005

_K = TypeVar("_K", bound=Hashable)


class RegionRows(Struct, frozen=True):
    """Rows of the table per module: shown at once, folded away, and left to the JSON."""

    shown: tuple[Region, ...]
    folded: tuple[Region, ...]
    left_out: int


class ByStep(Struct, frozen=True):
    """The strip: a row for each kind of block, a column for each kind of step.

    ``sentence`` says the whole where all steps agree, and what was put together where not.
    ``rows`` hold a label that is not escaped yet and a number a column, ``None`` for not known.
    """

    sentence: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, tuple[float | None, ...]], ...] = ()


def region_rows(regions: Sequence[Region]) -> RegionRows:
    """The first rows and every block unlike them; blocks that repeat one are folded."""
    shown = list(regions[:MOST_ROWS])
    seen = {_likeness(region) for region in shown}
    folded = []
    for region in regions[MOST_ROWS:]:
        if _likeness(region) in seen or len(shown) >= 2 * MOST_ROWS:
            folded.append(region)
        else:
            seen.add(_likeness(region))
            shown.append(region)
    return RegionRows(tuple(shown), tuple(folded[:MOST_FOLDED]), len(folded[MOST_FOLDED:]))


def _likeness(region: Region) -> tuple[str | None, float, tuple[Checkpoint, ...]]:
    return (
        region.module_class,
        round(region.recompute_runs_per_backward, 1),
        region.checkpoints,
    )


def by_step(result: Result) -> ByStep | None:
    """The strip; ``None`` where the result does not hold the numbers of single steps."""
    regions = result.regions
    places = [place for place, step in enumerate(result.steps) if step.complete]
    if not regions or not places:
        return None
    if any(len(region.recomputes_by_step) != len(result.steps) for region in regions):
        return None
    shown = [tuple(_rounded(r.recomputes_by_step[place]) for place in places) for r in regions]
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
    if len(rows) > MOST_KINDS or len(steps) > MOST_COLUMNS:
        sentence += (
            f" {plural(max(0, len(rows) - MOST_KINDS), 'row')} and "
            f"{plural(max(0, len(steps) - MOST_COLUMNS), 'column')} more are in the JSON."
        )
    steps = steps[:MOST_COLUMNS]
    return ByStep(
        sentence,
        columns=tuple(ranges([result.steps[places[place]].index for place in of]) for of in steps),
        rows=tuple(
            (_label(result, of), tuple(shown[of[0]][same[0]] for same in steps))
            for of in rows[:MOST_KINDS]
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


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "groups": block_groups(result.regions),
        "by_step": by_step(result),
        "rows": region_rows(result.regions),
    }


def _text(page: Page, result: Result) -> None:
    groups = block_groups(result.regions)
    if not groups:
        return
    page.title("Blocks")
    for group in groups[:_MOST_GROUPS_TEXT]:
        more = group.first.recompute_runs_per_backward >= _MORE_THAN_ONCE
        page.prose(_group_words(group, more=more), "    ", "  ", **({"fg": "red"} if more else {}))
    if len(groups) > _MOST_GROUPS_TEXT:
        page.prose(f"and {len(groups) - _MOST_GROUPS_TEXT} more kinds of block (see the report)")


def _group_words(group: BlockGroup, *, more: bool) -> str:
    kind = f" ({visible(group.first.module_class, 30)})" if group.first.module_class else ""
    each = " each" if len(group.regions) > 1 else ""
    redundant = f", {ms(group.redundant_ms)} redundant per step" if more else ""
    recomputes = times(group.first.recompute_runs_per_backward)
    return f"{visible(group.label, 60)}{kind}: {recomputes} recomputes{each}{redundant}"


def _markdown(result: Result) -> str:
    groups = block_groups(result.regions)
    if not groups:
        return ""
    rows = [
        f"| {markdown_code(group.label, 80)} | {len(group.regions)} "
        f"| **{times(group.first.recompute_runs_per_backward)}** "
        f"| {ms(group.recompute_ms)} | {ms(group.redundant_ms)} |"
        for group in groups[:_MOST_GROUPS_MARKDOWN]
    ]
    head = ["| Block | Number | Recomputes each | Recomputes per step | Redundant per step |"]
    table = "\n".join([*head, "| --- | ---: | ---: | ---: | ---: |", *rows])
    more = len(groups) - _MOST_GROUPS_MARKDOWN
    return table + (f"\n\n{plural(more, 'more kind')} of block left out." if more > 0 else "")


SECTION = Section(
    anchor="modules",
    title="Block by block",
    template="block_by_block.html",
    present=lambda result: analysed(result) and bool(result.regions),
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Blocks",
    help=(
        "Block by block",
        "counts every block. 0 did not run again, 1 is ordinary, 2 and more is doubled. With "
        "several ranks, those alike share a row.",
    ),
)
