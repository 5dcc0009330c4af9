"""Of arrays what NumPy tells as well, but only after loading ``numpy.ma``.

Loading that takes longer than all that is asked here in a small trace.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Value = TypeVar("_Value", bound=np.generic)


def distinct(values: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """The values in ascending order, each once: ``np.unique``."""
    ordered = np.sort(values, axis=None)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


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
