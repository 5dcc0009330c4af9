"""Of arrays what NumPy tells as well, but only after loading ``numpy.ma``, as a rule.

Loading that takes longer than all that is asked here in a small trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Value = TypeVar("_Value", bound=np.generic)

# Numbers up to so many times as large as there are of them are told apart without sorting.
_DENSE = 4


def distinct(values: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """The values in ascending order, each once: ``np.unique``."""
    ordered = np.sort(values, axis=None)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


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
    """The different ones of these numbers from 0, ascending, and the position there of each.

    ``np.unique(numbers, return_inverse=True)``, without sorting where the numbers are not large.
    """
    most = int(numbers.max(initial=0)) + 1
    if most > _DENSE * len(numbers):
        known, place = np.unique(numbers, return_inverse=True)
        return known, place
    found = np.zeros(most, np.bool_)
    found[numbers] = True
    return np.flatnonzero(found), (np.cumsum(found) - 1)[numbers]


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
