"""Which ranks record: ``--ranks`` as a person writes it."""

from __future__ import annotations

import re

from recompute_scan.errors import UsageError

# The first rank, and the one that stands furthest from it: another node, another pipeline stage.
DEFAULT = "0,last"

_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def chosen(text: str, world_size: int) -> frozenset[int]:
    """The ranks that ``text`` names among ``world_size``, 0-based; empty where it names no such.

    Args:
        text: ``all``, or a list with commas of ranks (``3``), ranges with both ends (``8-15``)
            and ``last``.
        world_size: How many ranks there are, at least 1.

    Raises:
        UsageError: The text is none of these (``E224``).
    """
    if text == "all":
        return frozenset(range(world_size))
    found: set[int] = set()
    for item in text.split(","):
        if item.strip() == "last":
            found.add(world_size - 1)
            continue
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise UsageError(
                "E224",
                f"--ranks {text} names no ranks.",
                hint="all, or a list such as 0, 0,last or 0,8-15",
            )
        first = int(match[1])
        found.update(range(first, min(int(match[2] or first), world_size - 1) + 1))
    return frozenset(rank for rank in found if rank < world_size)
