"""Blocks and checkpoints in groups, so that two hundred alike layers are said once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from recompute_scan.result import Checkpoint, Region

_LAST_NUMBER = re.compile(r"^(.*?)(\d{1,9})(\D*)$", re.DOTALL)
_MOST_RANGES = 6


class BlockGroup(Struct, frozen=True):
    """Blocks that are the same but for their number. ``label`` is not escaped yet."""

    label: str
    regions: tuple[Region, ...]

    @property
    def first(self) -> Region:
        """The earliest of them in forward order."""
        return self.regions[0]

    @property
    def recompute_ms(self) -> float:
        """All their recomputes in one step, in ms."""
        return sum(region.recompute_ms_per_step for region in self.regions)

    @property
    def redundant_ms(self) -> float:
        """Their redundant recomputes in one step, in ms."""
        return sum(region.redundant_ms_per_step for region in self.regions)


class Stack(Struct, frozen=True):
    """One arrangement of checkpoints, outermost first, and the blocks it is around."""

    label: str
    blocks: int
    recomputes: float
    checkpoints: tuple[Checkpoint, ...]


def block_label(region: Region) -> str:
    """The block's module, or its number and signature where no module is known."""
    return region.module or f"block {region.ordinal} ({region.signature})"


def block_groups(regions: Iterable[Region]) -> list[BlockGroup]:
    """Blocks gathered by name pattern, class, recomputes and checkpoints, in forward order."""
    groups: dict[object, list[Region]] = {}
    for region in regions:
        key = (
            *_pattern(region)[:2],
            region.module_class,
            round(region.recompute_runs_per_backward, 2),
            region.checkpoints,
        )
        groups.setdefault(key, []).append(region)
    return [BlockGroup(_group_label(members), tuple(members)) for members in groups.values()]


def _pattern(region: Region) -> tuple[str, str, int]:
    """What is before and after the block's number, and the number."""
    if region.module is None:
        return ("block ", "", region.ordinal)
    match = _LAST_NUMBER.match(region.module)
    if match is None:
        return (region.module, "", -1)
    return (match[1], match[3], int(match[2]))


def _group_label(members: Sequence[Region]) -> str:
    before, after, first = _pattern(members[0])
    if len(members) == 1:
        return block_label(members[0])
    if first < 0:
        return before
    if members[0].module is None:
        before = "blocks "
    numbers = ranges(sorted({_pattern(region)[2] for region in members}))
    return f"{before}[{numbers}]{after}" if "," in numbers else f"{before}{numbers}{after}"


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7``; long lists of single numbers lose their middle: ``0, 2, 4, …, 30``."""
    parts: list[str] = []
    start = previous = None
    for number in (*numbers, None):
        if start is not None and previous is not None and number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        elif start is None:
            start = number
        previous = number
    if len(parts) > _MOST_RANGES:
        parts = [*parts[:3], "…", parts[-1]]
    return ", ".join(parts)


def checkpoint_stacks(regions: Iterable[Region]) -> list[Stack]:
    """Checkpoint call sites: each arrangement of checkpoints once, most recomputes first."""
    stacks: dict[tuple[Checkpoint, ...], list[Region]] = {}
    for region in regions:
        if region.checkpoints:
            stacks.setdefault(region.checkpoints, []).append(region)
    found = [
        Stack(
            label=", ".join(group.label for group in block_groups(members)[:3]),
            blocks=len(members),
            recomputes=max(region.recompute_runs_per_backward for region in members),
            checkpoints=checkpoints,
        )
        for checkpoints, members in stacks.items()
    ]
    return sorted(found, key=lambda stack: -stack.recomputes)
