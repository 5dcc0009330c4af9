"""Array helpers: those that NumPy lacks, and short names for its own that ``recompute`` uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Value = TypeVar("_Value", bound=np.generic)
_Number = TypeVar("_Number", np.int64, np.float64)


def true_at(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """``np.flatnonzero``."""
    return np.flatnonzero(mask)


def gaps(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """``np.diff``."""
    return np.diff(values)


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
    return np.diff(begins, append=end)


def distinct(values: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    """``np.unique``."""
    return np.unique(values)


def tally(values: npt.NDArray[_Value]) -> tuple[npt.NDArray[_Value], npt.NDArray[np.int64]]:
    """``np.unique`` with counts."""
    return np.unique(values, return_counts=True)


def among(values: npt.NDArray[_Value], wanted: npt.NDArray[_Value]) -> npt.NDArray[np.bool_]:
    """``np.isin``."""
    return np.isin(values, wanted)


def ranked(
    numbers: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``np.unique`` with the inverse."""
    return np.unique(numbers, return_inverse=True)


def median(values: npt.NDArray[np.number[Any]] | Sequence[float]) -> float:
    """``np.median``; NaN of no values, without a warning."""
    return float(np.median(values)) if len(values) else float("nan")
