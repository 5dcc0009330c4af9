"""Array helpers that NumPy lacks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Value = TypeVar("_Value", bound=np.generic)


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
    begins = np.flatnonzero(changes(ordered))
    return dict(zip(ordered[begins].tolist(), split(order, begins), strict=True))


def turns_of(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each of these values: how often it came before."""
    order = values.argsort(kind="stable")
    ordered = values[order]
    turns = np.empty(len(values), np.int64)
    turns[order] = np.arange(len(values)) - ordered.searchsorted(ordered)
    return turns


def medians_of(
    values: npt.NDArray[Any], *keys: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """For each value: the median of all with equal keys, and their number."""
    order = np.lexsort((values, *keys))
    first = np.flatnonzero(changes(*(key[order] for key in keys)))
    size = np.diff(first, append=len(values))
    ordered = values[order]
    middle = (ordered[first + (size - 1) // 2] + ordered[first + size // 2]) / 2
    medians, number = np.empty(len(values)), np.empty(len(values), np.int64)
    medians[order], number[order] = middle.repeat(size), size.repeat(size)
    return medians, number


def median(values: npt.NDArray[np.number[Any]] | Sequence[float]) -> float:
    """``np.median``; NaN of no values, without a warning."""
    return float(np.median(values)) if len(values) else float("nan")
