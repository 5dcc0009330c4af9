"""What is kept of a tensor in its place: its exact bits as one number, and up to 256 others.

The bits tell whether two tensors are the same. The others tell how far apart they are: the elements
themselves where there are no more, else sums of all elements with signs of their own, of which the
difference is as long as that of the tensors, give or take a tenth. Nothing here keeps a tensor, and
nothing that looks at one is seen by modes, subclasses, hooks or the autograd of the script.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from isal import isal_zlib
from msgspec import Struct

_T = TypeVar("_T")
_VALUES = 256
_COLUMNS = 1024
# Elements that are looked at together, so that little memory is needed: on the CPU what its cache
# holds, elsewhere what keeps it busy.
_TOGETHER, _TOGETHER_ELSEWHERE = 2**18, 2**24
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REAL = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}
_PLAIN = {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)}


class Fingerprint(Struct, eq=False):
    """A tensor's type and shape, its bits as a number, and what tells how far away another is.

    Attributes:
        dtype: Its type.
        shape: Its shape; -1 for a ragged size.
        bits: A number that depends on every bit and its place.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int
    _tensor: torch.Tensor | None = None
    _sums: _Sums | None = None

    def same_bits(self, other: Fingerprint) -> bool:
        """Whether both tensors were the same, to the last bit."""
        return self.bits == other.bits and self.dtype == other.dtype and self.shape == other.shape

    @property
    def sums(self) -> _Sums | None:
        """What tells how far away another is; ``None`` behind :meth:`let_go`."""
        if self._sums is None and self._tensor is not None:
            self._sums = unseen(_sums_of, self._tensor)
        return self._sums

    def held(self, tensor: torch.Tensor) -> Fingerprint:
        """This, or this in another shape: the same elements are there again, and as they were."""
        if tensor.shape != self.shape:
            return Fingerprint(self.dtype, tuple(tensor.shape), self.bits, tensor, self._sums)
        self._tensor = tensor
        return self

    def let_go(self, *, keep: bool) -> None:
        """The tensor may change from here on. Comparisons of bits need nothing else; with ``keep``
        one can be asked for its distance from others still.
        """
        if keep:
            _ = self.sums
        self._tensor = None

    def distance(self, other: Fingerprint) -> float | None:
        """Norm of the difference over this one's norm, of all elements; 0 or more.

        ``None`` for other shapes, or where it is not known any more; infinite where other elements
        are finite. What is infinite, or no number, in both counts as the same.
        """
        mine, others = self.sums, other.sums
        if mine is None or others is None or self.shape != other.shape:
            return None
        if mine.values.shape != others.values.shape:
            return None
        return unseen(mine.distance, others)

    def rounding(self) -> float:
        """The largest distance that another order of summation explains: 1e-4 in float32, a
        multiple of what the type resolves where that is coarser.
        """
        if not self.dtype.is_floating_point:
            return 0.0
        return max(1e-4, 2.5 * torch.finfo(self.dtype).eps)


class _Sums(Struct, eq=False):
    """What is kept of a tensor's elements.

    Attributes:
        values: Up to 256 numbers: the elements, or sums of them.
        not_finite: How many elements are infinite or no number, and count as 0 in the sums.
    """

    values: torch.Tensor
    not_finite: int = 0

    def distance(self, other: _Sums) -> float:
        """Norm of the difference over this one's norm."""
        mine, others = self.values.double(), other.values.double()
        finite = mine.isfinite() & others.isfinite()
        if self.not_finite != other.not_finite or not torch.equal(
            mine.isfinite(), others.isfinite()
        ):
            return float("inf")
        mine, others = mine[finite], others[finite]
        norm = float(mine.norm())
        apart = float((mine - others).norm())
        return apart / norm if norm else (float("inf") if apart else 0.0)


def unseen(function: Callable[..., _T], *args: Any) -> _T:
    """What the function returns; no mode or subclass of the script's and no autograd sees it work.

    Not a context manager of ours: one that failed between its beginning and the body would leave
    autograd off.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        on = torch.is_grad_enabled()
        try:
            if on:  # by torch's function itself: its context manager takes twice as long
                torch._C._set_grad_enabled(False)
            return function(*args)
        finally:
            if on:
                torch._C._set_grad_enabled(True)


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is no subclass, so that a kernel can read it as it is."""
    return type(value) in _PLAIN


def plain_parts(value: torch.Tensor) -> list[torch.Tensor] | None:
    """The plain tensors that hold a tensor's elements; ``None`` where they cannot be had."""
    if is_plain(value):
        if value.layout == torch.strided:
            return [value]
        if value.layout == torch.sparse_coo:
            return [value._values(), value._indices()]
        if value.layout == torch.sparse_csr:
            return [value.values(), value.col_indices(), value.crow_indices()]
        return None
    if type(value).__name__ == "AsyncCollectiveTensor" or not hasattr(value, "__tensor_flatten__"):
        return None
    parts: list[torch.Tensor] = []
    for name in value.__tensor_flatten__()[0]:
        inner = plain_parts(getattr(value, name))
        if inner is None:
            return None
        parts += inner
    return parts


def fingerprint(value: torch.Tensor) -> Fingerprint | None:
    """The tensor's fingerprint, to be taken :func:`unseen`, which holds it until it lets go of it.

    ``None`` of one whose elements are nowhere, or not to be had.
    """
    if _lies_ready(value):
        return Fingerprint(value.dtype, tuple(value.shape), _bits_here(value, 0), value)
    parts = plain_parts(value)
    if not parts or any(part.is_quantized or part.is_meta for part in parts):
        return None
    bits = 0
    for part in parts:
        for flat in _flat_pieces(part):
            bits = _bits(flat, bits)
    # A ragged size has a name of its own in each tensor.
    shape = tuple(size if type(size) is int else -1 for size in value.shape)
    return Fingerprint(value.dtype, shape, bits, parts[0])


def _lies_ready(value: torch.Tensor) -> bool:
    """Whether the tensor is its memory on the CPU, byte by byte, as most are."""
    return (
        is_plain(value)
        and value.layout == torch.strided
        and value.is_cpu
        and value.dtype in _REAL
        and value.is_contiguous()
        and not value.is_neg()
    )


def in_one_piece(value: torch.Tensor) -> bool:
    """Whether all is looked at together, whatever the shape."""
    return value.numel() <= _TOGETHER and _lies_ready(value)


def _sums_of(part: torch.Tensor) -> _Sums:
    if in_one_piece(part):
        flat = part.detach().view(-1)
        return _Sums(flat.clone()) if len(flat) <= _VALUES else _Sums(*_signed_sums(flat))
    if part.numel() <= _VALUES:
        return _Sums(next(_flat_pieces(part)).clone())
    values, not_finite = None, 0
    for flat in _flat_pieces(part):
        some, others = _signed_sums(flat)
        values = some if values is None else values + some
        not_finite += others
    assert values is not None
    return _Sums(values, not_finite)


def _flat_pieces(part: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, as they count, in flat pieces."""
    part = part.detach()
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    elif part.is_neg():
        part = part.resolve_neg()
    return _pieces(part, _TOGETHER if part.device.type == "cpu" else _TOGETHER_ELSEWHERE)


def _pieces(part: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, in flat pieces that depend on its shape only."""
    if part.numel() <= most:
        yield part.contiguous().view(-1)
        return
    dim = next(dim for dim, size in enumerate(part.shape) if size > 1)
    per = max(1, most * part.shape[dim] // part.numel())
    for piece in torch.split(part, per, dim):
        yield from _pieces(piece, most)


def _signed_sums(flat: torch.Tensor) -> tuple[torch.Tensor, int]:
    """256 sums of elements, each with a sign of its own, and how many elements are not finite."""
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.float()
    sums = _sum_with_signs(flat)
    if not sums.is_floating_point() or math.isfinite(sums.sum()):
        return sums, 0
    finite = flat.isfinite()
    return _sum_with_signs(flat.where(finite, 0)), int((~finite).sum())


def _sum_with_signs(flat: torch.Tensor) -> torch.Tensor:
    if flat.numel() < _VALUES:
        flat = torch.nn.functional.pad(flat, (0, _VALUES - flat.numel()))
    rows, more = divmod(flat.numel(), _VALUES)
    signs = _signs(rows, flat.device)
    table = flat.as_strided((_VALUES, rows), (1, _VALUES))
    if flat.dtype == torch.float32 and flat.is_cpu:
        sums = torch.mv(table, signs)
    else:  # on a GPU a product may be refused where only deterministic kernels are allowed
        sums = (table * signs).sum(1)
    if more:
        sums[:more] += flat[-more:]
    return sums


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


def _bits(flat: torch.Tensor, so_far: int) -> int:
    if not flat.numel():
        return so_far
    if flat.is_cpu:
        return _bits_here(flat, so_far)
    number = _weighted_sums(flat.view(_SAME_SIZE[flat.element_size()]))
    return (so_far * 0x2545F4914F6CDD1D + number) & (2**64 - 1)


def _bits_here(value: torch.Tensor, so_far: int) -> int:
    size = value.numel() * value.element_size()
    if not size:
        return so_far
    # Not through numpy: torch never again resizes memory that numpy has seen, and FSDP does.
    return isal_zlib.crc32((ctypes.c_char * size).from_address(value.data_ptr()), so_far)


def _weighted_sums(whole: torch.Tensor) -> int:
    """A number that depends on each integer and its place, worked out on the tensor's device.

    Sums along the rows and along the columns of a table, weighted: two kernels' reads of the
    tensor, and memory for the sums only.
    """
    rows = whole.numel() // _COLUMNS
    table = whole[: rows * _COLUMNS].view(rows, _COLUMNS)
    rest = whole[rows * _COLUMNS :].to(torch.int64)
    down, across = table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)
    total = _weigh(down, 0x9E3779B97F4A7C15) + _weigh(across, 0xC2B2AE3D27D4EB4F)
    return int(total + _weigh(rest, 0x165667B19E3779F9)) & (2**64 - 1)


def _weigh(sums: torch.Tensor, step: int) -> torch.Tensor:
    """The sum of all, each times an odd number of its own; wraps around at 64 bits."""
    odd = step | 1
    signed = odd - 2**64 if odd >= 2**63 else odd
    places = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64)
    return (sums * ((2 * places + 1) * signed)).sum()
