"""How far apart two tensors are, told from a few numbers that are kept of each.

The numbers are the elements themselves where there are few, else sums of all elements with signs of
their own: a random projection, of which the difference is as long as that of the tensors, give or
take 1 / sqrt(2 n) for n sums (W. B. Johnson, J. Lindenstrauss 1984; with signs instead of normal
numbers D. Achlioptas 2003). One sum for 1,024 elements, and never fewer than 32 (an eighth) or more
than 256 (a twentieth): what is kept of a tensor is small beside it.
"""

from __future__ import annotations

import functools
import math
from array import array

import torch
from msgspec import Struct

from recompute_scan.fidelity.elements import flat_pieces, in_one_piece

# Of so many elements or fewer, the elements.
_FEW = 64
_FEWEST, MOST, _FOR_EACH = 32, 256, 1024


class Sums(Struct, eq=False):
    """What is kept of a tensor's elements.

    Attributes:
        values: The elements, or sums of them: 32 to 256, by the tensor's size alone.
        not_finite: How many elements are infinite or no number, and count as 0 in the sums.
    """

    values: array[float]
    not_finite: int = 0

    def distance(self, other: Sums) -> float | None:
        """Norm of the difference over this one's norm; ``None`` for tensors of other sizes."""
        if len(self.values) != len(other.values):
            return None
        pairs = list(zip(self.values, other.values, strict=True))
        finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        if self.not_finite != other.not_finite or any(
            math.isfinite(a) != math.isfinite(b) for a, b in pairs
        ):
            return float("inf")
        norm = math.hypot(*(a for a, _ in finite))
        apart = math.hypot(*(a - b for a, b in finite))
        return apart / norm if norm else (float("inf") if apart else 0.0)


def sums_of(part: torch.Tensor, fewest: int = _FEWEST) -> Sums:
    """The sums of a plain tensor, to be taken unseen; never fewer than ``fewest``."""
    size = part.numel() * (2 if part.is_complex() else 1)
    whole = in_one_piece(part)
    if size <= max(_FEW, fewest):
        flat = part.view(-1) if whole else next(flat_pieces(part))
        return Sums(array("d", flat.tolist()))
    number = min(MOST, max(fewest, size // _FOR_EACH))
    if whole:
        return Sums(*_signed_sums(part.view(-1), number))
    values, not_finite = array("d", bytes(8 * number)), 0
    for flat in flat_pieces(part):
        some, others = _signed_sums(flat, number)
        values = array("d", (a + b for a, b in zip(values, some, strict=True)))
        not_finite += others
    return Sums(values, not_finite)


def _signed_sums(flat: torch.Tensor, number: int) -> tuple[array[float], int]:
    """Sums of elements, each with a sign of its own, and how many elements are not finite."""
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.float()
    sums = _sum_with_signs(flat, number)
    if math.isfinite(sum(sums)):
        return array("d", sums), 0
    finite = flat.isfinite()
    return array("d", _sum_with_signs(flat.where(finite, 0), number)), int((~finite).sum())


def _sum_with_signs(flat: torch.Tensor, number: int) -> list[float]:
    size = flat.numel()
    if size < number:
        flat = torch.nn.functional.pad(flat, (0, number - size))
    rows, more = divmod(flat.numel(), number)
    signs = _signs(rows, flat.device)
    table = flat.as_strided((number, rows), (1, number))
    if flat.dtype == torch.float32 and flat.is_cpu:
        sums = torch.mv(table, signs)
    else:  # on a GPU a product may be refused where only deterministic kernels are allowed
        sums = (table * signs).sum(1)
    if more:
        sums[:more] += flat[-more:]
    found: list[float] = sums.tolist()
    return found


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
