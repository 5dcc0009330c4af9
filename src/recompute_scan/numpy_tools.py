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


def median(values: npt.NDArray[np.number[Any]] | Sequence[float]) -> float:
    """``np.median``; NaN of no values, without a warning."""
    return float(np.median(values)) if len(values) else float("nan")
