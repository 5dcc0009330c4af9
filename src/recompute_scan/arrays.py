"""Of arrays what NumPy tells as well, but after loading ``numpy.ma`` or much else, as a rule.

In a small trace, that takes longer than all that is asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Value = TypeVar("_Value", bound=np.generic)
_Number = TypeVar("_Number", np.int64, np.float64)

# Numbers up to so many times as large as there are of them are told apart without sorting.
_DENSE = 4


def true_at(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Where it is true, ascending: ``np.flatnonzero``."""
    return mask.nonzero()[0]


def gaps(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """From each value to the next: ``np.diff`` of numbers."""
    return values[1:] - values[:-1]


def changes(*keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each row: is any key another than in the row before? The first row is a change."""
    differ = np.zeros(len(keys[0]), np.bool_)
    differ[:1] = True
    for key in keys:
        differ[1:] |= key[1:] != key[:-1]
    return differ


def split(values: npt.NDArray[_Value], begins: npt.NDArray[np.int64]) -> list[npt.NDArray[_Value]]:
    """The values in runs that begin there, the first of them at 0; ``np.split``."""
    edges = [*begins.tolist(), len(values)]
    return [values[begin:end] for begin, end in pairwise(edges)]


def places_of(values: npt.NDArray[np.signedinteger[Any]]) -> dict[int, npt.NDArray[np.int64]]:
    """Of each of the different values, ascending, where it stands."""
    order = values.argsort(kind="stable")
    ordered = values[order]
    begins = true_at(changes(ordered))
    return dict(zip(ordered[begins].tolist(), split(order, begins), strict=True))


def sizes(begins: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int64]:
    """How long each of these runs is that follow one another, the last up to ``end``."""
    return gaps(np.concatenate((begins, (end,))))


def distinct(values: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """The values in ascending order, each once: ``np.unique``."""
    ordered = values.flatten()
    ordered.sort()
    return ordered[changes(ordered)]


def tally(values: npt.NDArray[_Value]) -> tuple[npt.NDArray[_Value], npt.NDArray[np.int64]]:
    """The values in ascending order, each once, and how often each is there."""
    ordered = values.flatten()
    ordered.sort()
    first = true_at(changes(ordered))
    return ordered[first], sizes(first, len(ordered))


def among(values: npt.NDArray[_Value], wanted: npt.NDArray[_Value]) -> npt.NDArray[np.bool_]:
    """For each value: is it one of these? ``np.isin``."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(wanted)
    place = np.minimum(ordered.searchsorted(values), len(ordered) - 1)
    return np.asarray(ordered[place] == values, np.bool_)


def ranked(
    numbers: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The different ones of these numbers, ascending, and the position there of each.

    ``np.unique(numbers, return_inverse=True)``, without sorting where they are not large.
    """
    most = int(numbers.max(initial=0)) + 1
    if most > _DENSE * len(numbers) or numbers.min(initial=0) < 0:
        order = numbers.argsort(kind="stable")
        ordered = numbers[order]
        first = changes(ordered)
        place = np.empty(len(numbers), np.int64)
        place[order] = first.cumsum() - 1
        return ordered[first], place
    found = np.zeros(most, np.bool_)
    found[numbers] = True
    return true_at(found), (found.cumsum() - 1)[numbers]


def percentile(values: npt.NDArray[np.number[Any]], percent: float) -> float:
    """``np.percentile`` by linear interpolation, to the last bit.

    Args:
        values: At least one number.
        percent: From 0 to 100.
    """
    place = (len(values) - 1) * (percent / 100)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    ordered = np.partition(values, (below, above))
    low, high, rest = float(ordered[below]), float(ordered[above]), place - below
    return high - (high - low) * (1 - rest) if rest >= 0.5 else low + (high - low) * rest


def median(values: npt.NDArray[np.number[Any]] | Sequence[float]) -> float:
    """``np.median``, to the last bit: NaN of no values, and where one is NaN."""
    ordered = np.sort(values)
    if not len(ordered) or ordered[-1] != ordered[-1]:
        return float("nan")
    low, high = (len(ordered) - 1) // 2, len(ordered) // 2
    return (float(ordered[low]) + float(ordered[high])) / 2
