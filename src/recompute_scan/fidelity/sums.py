"""How far apart two tensors are, told from a few numbers that are kept of each.

The numbers are the elements themselves where there are few, else sums of all elements with signs of
their own: a random projection, of which the difference is as long as that of the tensors, give or
take 1 / sqrt(2 n) for n sums (W. B. Johnson, J. Lindenstrauss 1984; with signs instead of normal
numbers D. Achlioptas 2003). One sum for 1,024 elements, and never fewer than 32 (an eighth) or more
than 256 (a twentieth): what is kept of a tensor is small beside it.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from recompute_scan.fidelity.elements import TOGETHER, flat_pieces, order_in_memory

# Of so many elements or fewer, the elements.
_FEW = 64
_FEWEST, MOST, _FOR_EACH = 32, 256, 1024


_Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
# Types of which numpy, which begins sooner, sums what lies in this machine's memory.
_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}


class Sums(Struct, eq=False, gc=False):
    """What is kept of a tensor's elements.

    Attributes:
        values: The elements, or sums of them: 32 to 256, by the tensor's size alone.
        not_finite: How many elements are infinite or no number, and count as 0 in the sums.
    """

    values: _Floats
    not_finite: int = 0

    def distance(self, other: Sums) -> float | None:
        """Norm of the difference over this one's norm; ``None`` for tensors of other sizes."""
        if len(self.values) != len(other.values):
            return None
        mine, others = self.values.astype(np.float64), other.values.astype(np.float64)
        finite = np.isfinite(mine)
        if self.not_finite != other.not_finite or (finite != np.isfinite(others)).any():
            return float("inf")
        norm = math.hypot(*mine[finite])
        with np.errstate(all="ignore"):
            apart = math.hypot(*(mine[finite] - others[finite]))
        return apart / norm if norm else (float("inf") if apart else 0.0)


def sums_of(part: torch.Tensor, fewest: int = _FEWEST, *, ready: bool = False) -> Sums:
    """The sums of a plain tensor, to be taken unseen; never fewer than ``fewest``.

    With ``ready`` it is known to be its memory on the CPU, in order.
    """
    size = part.numel() * (2 if part.is_complex() else 1)
    whole = part.numel() <= TOGETHER and (ready or order_in_memory(part) == ())
    if size <= max(_FEW, fewest):
        flat = part.view(-1) if whole else next(flat_pieces(part))
        return Sums(np.array(flat.tolist(), np.float64))
    number = min(MOST, max(fewest, size // _FOR_EACH))
    # A warning of infinities, which are counted, would stand among what the script prints.
    with np.errstate(all="ignore"):
        if whole:
            return Sums(*_signed_sums(part, number))
        values: _Floats = np.zeros(number)
        not_finite = 0
        for flat in flat_pieces(part):
            some, others = _signed_sums(flat, number)
            values += some
            not_finite += others
        return Sums(values, not_finite)


def _signed_sums(piece: torch.Tensor, number: int) -> tuple[_Floats, int]:
    """Sums of elements that lie in order, each with a sign of its own, and how many elements are
    not finite.
    """
    known = _NUMPYS.get(piece.dtype) if piece.is_cpu else None
    if known is not None:
        return _sums_here(piece, number, known)
    flat = piece.view(-1)
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.float()
    sums = _sum_with_signs(flat, number)
    if math.isfinite(sums.sum()):
        return sums, 0
    finite = flat.isfinite()
    return _sum_with_signs(flat.where(finite, 0), number), int((~finite).sum())


def _sums_here(piece: torch.Tensor, number: int, known: type[Any]) -> tuple[_Floats, int]:
    """The same, of memory that numpy reads for as long as this takes."""
    size = piece.numel() * piece.element_size()
    # Not by `Tensor.numpy`: torch never again resizes memory that numpy has asked it for.
    memory: Any = (ctypes.c_char * size).from_address(piece.data_ptr())
    elements = np.frombuffer(memory, known)
    sums = _sum_rows(elements, number)
    if math.isfinite(sums.dot(sums)):
        return sums, 0
    finite = np.isfinite(elements)
    return _sum_rows(np.where(finite, elements, 0), number), int((~finite).sum())


def _sum_rows(elements: _Floats, number: int) -> _Floats:
    if len(elements) < number:
        elements = np.pad(elements, (0, number - len(elements)))
    rows, more = divmod(len(elements), number)
    sums: _Floats = _signs_here(rows, elements.dtype).dot(
        elements[: rows * number].reshape(rows, number)
    )
    if more:
        sums[:more] += elements[-more:]
    return sums


def _sum_with_signs(flat: torch.Tensor, number: int) -> _Floats:
    size = flat.numel()
    if size < number:
        flat = torch.nn.functional.pad(flat, (0, number - size))
    rows, more = divmod(flat.numel(), number)
    table = flat.as_strided((rows, number), (number, 1))
    # On a GPU a matrix product may be refused where only deterministic kernels are allowed.
    sums = (table * _signs(rows, flat.device)[:, None]).sum(0)
    if more:
        sums[:more] += flat[-more:]
    return np.array(sums.tolist(), np.float64)


@functools.lru_cache(maxsize=64)
def _signs_here(rows: int, known: np.dtype[Any]) -> _Floats:
    return np.array(_signs(rows, torch.device("cpu")).tolist(), known)


@functools.lru_cache(maxsize=64)
def _signs(rows: int, device: torch.device) -> torch.Tensor:
    """1 or -1 for each row, in no order."""
    # Bits of multiples of the golden ratio, mixed: another run has the same ones.
    mixed = torch.arange(1, rows + 1, device=device, dtype=torch.int64) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    signs = ((mixed >> 13) & 1).mul_(2).sub_(1).float()
    # Their sum is as large as that of random ones, so that a constant is not lost in it.
    excess = (int(signs.sum()) - round(rows**0.5)) // 2
    signs[(signs == (1 if excess > 0 else -1)).nonzero()[: abs(excess), 0]] *= -1
    return signs
