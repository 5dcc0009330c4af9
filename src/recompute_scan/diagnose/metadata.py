"""What torch says when a replay saved tensors of another shape or dtype than the original run.

The text is that of ``torch.utils.checkpoint`` (torch 2.1 to 2.13): a line for what was saved and
one for what the replay made, for each tensor that differs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from recompute_scan.crash import Raised

_META = r"metadata: \{'shape': torch\.Size\(\[([\d, ]*)\]\), 'dtype': ([\w.]+)"
_PAIR = re.compile(rf"saved {_META}.*?recomputed {_META}", re.DOTALL)
# Rows that another routing of tokens to experts moves, at most.
_FEW_ROWS = 0.2


@dataclass(frozen=True)
class Mismatch:
    """One tensor: shape and dtype as saved, and as the replay made it."""

    saved: tuple[int, ...]
    replayed: tuple[int, ...]
    saved_dtype: str
    replayed_dtype: str


def mismatches(message: str) -> list[Mismatch]:
    """The tensors that an error names, in its order."""
    return [
        Mismatch(_shape(match[1]), _shape(match[3]), match[2], match[4])
        for match in _PAIR.finditer(message)
    ]


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def grew_twofold(raised: Raised) -> bool:
    """Every tensor differs only in dimensions that are exactly twice as long in the replay."""
    found = mismatches(raised.message)
    return bool(found) and all(_ratios(one) == {2.0} for one in found)


def came_back_empty(raised: Raised) -> bool:
    """Some tensor is empty in the replay and was not when saved: its parameter was given away."""
    return any(
        one.replayed == (0,) and one.saved not in ((0,), ()) for one in mismatches(raised.message)
    )


def shrank_evenly(raised: Raised) -> bool:
    """Every tensor differs only in dimensions that are a whole number of times shorter."""
    found = mismatches(raised.message)
    return bool(found) and all(
        bool(ratios := _ratios(one)) and all(0 < r <= 0.5 and (1 / r).is_integer() for r in ratios)
        for one in found
    )


def only_dtypes_differ(raised: Raised) -> bool:
    """Shapes are equal, dtypes are not."""
    found = mismatches(raised.message)
    return bool(found) and all(
        one.saved == one.replayed and one.saved_dtype != one.replayed_dtype for one in found
    )


def rows_moved(raised: Raised) -> bool:
    """Only first dimensions differ, by a few rows: tokens went to other experts."""
    found = mismatches(raised.message)
    return bool(found) and all(
        len(one.saved) == len(one.replayed) > 0
        and one.saved[1:] == one.replayed[1:]
        and 0 < abs(one.saved[0] - one.replayed[0]) <= max(1, _FEW_ROWS * one.saved[0])
        for one in found
    )


def _ratios(one: Mismatch) -> set[float]:
    """How many times as long each differing dimension is; empty for shapes of other rank."""
    if len(one.saved) != len(one.replayed):
        return set()
    pairs = zip(one.saved, one.replayed, strict=True)
    return {new / old if old else float("inf") for old, new in pairs if new != old}
