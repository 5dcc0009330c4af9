"""Fingerprints of tensors in bounded memory.

What is kept of a tensor in its place: its exact bits as one number, and up to 256 others.

The bits tell whether two tensors are the same, and the numbers how far apart
they are. Nothing here keeps a tensor, and nothing that looks at one is seen by modes, subclasses,
hooks or the autograd of the script.

Where a tensor's elements lie: the plain tensors that hold them, in pieces of a bounded size.

How far apart two tensors are, told from a few numbers that are kept of each.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from isal import isal_zlib
from msgspec import Struct

# Elements that are looked at together, so that little memory is needed: on the CPU what its cache
# holds, elsewhere what keeps it busy.
TOGETHER, _TOGETHER_ELSEWHERE = 2**18, 2**24
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
# Two numbers in a byte, of which no kernel copies any: they count as bytes.
_BYTES = {getattr(torch, "float4_e2m1fn_x2", None)}
_STRIDED = torch.strided
_PLAIN = {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)}


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is no subclass, so that a kernel can read it as it is."""
    return type(value) in _PLAIN


def plain_parts(value: torch.Tensor) -> list[torch.Tensor] | None:
    """The plain tensors that hold a tensor's elements; ``None`` where they cannot be had."""
    if is_plain(value):
        if value.layout == torch.strided:
            return [value.view(torch.uint8) if value.dtype in _BYTES else value]
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


def is_there(part: torch.Tensor, *, dense: bool = False) -> bool:
    """Whether a plain tensor's memory holds all its elements: it may have been given back.

    There is none, either, of zeros that need none, and of tensors that a transform works with.

    Args:
        part: The tensor.
        dense: Whether its elements are known to lie without gaps.
    """
    size = part.nbytes
    if not size:
        return True
    if not dense:
        last = sum((many - 1) * by for many, by in zip(part.shape, part.stride(), strict=True))
        size = (last + 1) * part.element_size()
    try:
        memory = part.untyped_storage()
        room = memory.nbytes() if memory.data_ptr() else 0
    except (RuntimeError, NotImplementedError):
        return False
    return room - part.storage_offset() * part.element_size() >= size


def order_in_memory(value: torch.Tensor) -> tuple[int, ...] | None:
    """How the elements lie of a tensor that is its memory on the CPU, byte by byte, as most are.

    ``()`` where they lie in order, else the strides; ``None`` of one with gaps or overlaps.
    """
    if (
        type(value) not in _PLAIN
        or value.dtype not in _REAL
        or not value.is_cpu
        or value.layout is not _STRIDED
        or value.is_neg()
    ):
        return None
    if value.is_contiguous():
        return ()
    strides, expected = value.stride(), 1
    for stride, size in sorted(zip(strides, value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return strides


class Part(Struct, frozen=True, gc=False):
    """Which part of its memory a tensor is.

    Attributes:
        key: Which, and as what; another shape of the same elements in the same order is the same.
            ``None`` where that cannot be said.
        order: See :func:`order_in_memory`.
    """

    key: object
    order: tuple[int, ...] | None


def part_of_memory(tensor: torch.Tensor) -> Part:
    """Which part of its memory a tensor is."""
    order = order_in_memory(tensor)
    if order:
        return Part((tensor.dtype, tensor.storage_offset(), tensor.shape, order), order)
    if order is not None and tensor.numel() <= TOGETHER:
        return Part((tensor.dtype, tensor.storage_offset(), tensor.numel()), order)
    if not is_plain(tensor) or tensor.layout != torch.strided:
        return Part(None, order)
    bits = tensor.is_conj(), tensor.is_neg()
    key = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), bits
    return Part(key, order)


def in_memory(value: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The elements as they lie: the tensor, or a flat one on its memory."""
    return value.as_strided((value.numel(),), (1,)) if order else value


def flat_pieces(part: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, as they count, in flat pieces."""
    part = part.detach()
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj().resolve_neg())
    elif part.is_neg():
        part = part.resolve_neg()
    return _pieces(part, TOGETHER if part.device.type == "cpu" else _TOGETHER_ELSEWHERE)


def _pieces(part: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, in flat pieces that depend on its shape only."""
    if part.numel() <= most:
        yield part.contiguous().view(-1)
        return
    dim = next(dim for dim, size in enumerate(part.shape) if size > 1)
    per = max(1, most * part.shape[dim] // part.numel())
    for piece in torch.split(part, per, dim):
        yield from _pieces(piece, most)


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


_T = TypeVar("_T")
_COLUMNS = 1024
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(Struct, eq=False, gc=False):
    """A tensor's type and shape, its bits as a number, and what tells how far away another is.

    Attributes:
        dtype: Its type.
        shape: Its shape; -1 for a ragged size.
        bits: A number that depends on every bit and its place.
        order: Strides of a tensor that was looked at as it lies in memory, where its elements do
            not lie in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int
    order: tuple[int, ...] = ()
    _tensor: torch.Tensor | None = None
    _sums: Sums | None = None
    _ready: bool = False

    def same_bits(self, other: Fingerprint) -> bool:
        """Whether both tensors were the same, to the last bit."""
        if self.order != other.order:
            both = self._in_one_order(other)
            return both is not None and both[0].same_bits(both[1])
        same = self.bits == other.bits and self.dtype == other.dtype and self.shape == other.shape
        if same and other._sums is None:
            other._sums = self._sums
        return same

    @property
    def sums(self) -> Sums | None:
        """What tells how far away another is; ``None`` behind :meth:`let_go`."""
        if self._sums is None and self._tensor is not None:
            self._sums = unseen(self._sum_up, self._tensor)
        return self._sums

    def held(self, tensor: torch.Tensor) -> Fingerprint:
        """This, or this in another shape: the same elements are there again, and as they were."""
        found = self.in_shape(tensor.shape)
        found._tensor = tensor
        return found

    def in_shape(self, shape: tuple[int, ...]) -> Fingerprint:
        """This, or that of the same elements in another shape."""
        if shape == self.shape:
            return self
        return Fingerprint(
            self.dtype, tuple(shape), self.bits, self.order, self._tensor, self._sums, self._ready
        )

    def let_go(self, *, keep: bool) -> None:
        """The tensor may change from here on; to be called unseen. Comparisons of bits need
        nothing else; with ``keep`` one can be asked for its distance from others still.
        """
        tensor, self._tensor = self._tensor, None
        if keep and self._sums is None and tensor is not None:
            self._sums = self._sum_up(tensor)

    def _sum_up(self, tensor: torch.Tensor) -> Sums:
        return sums_of(in_memory(tensor, self.order), ready=self._ready)

    def distance(self, other: Fingerprint) -> float | None:
        """Norm of the difference over this one's norm, of all elements; 0 or more.

        ``None`` for other shapes, or where it is not known any more; infinite where other elements
        are finite. What is infinite, or no number, in both counts as the same.
        """
        if self.shape != other.shape:
            return None
        both = (self, other) if self.order == other.order else self._in_one_order(other)
        mine, others = (one.sums for one in both) if both is not None else (None, None)
        return mine.distance(others) if mine is not None and others is not None else None

    def _in_one_order(self, other: Fingerprint) -> tuple[Fingerprint, Fingerprint] | None:
        """Both, one of which is taken once more, of its elements in the order of the other's.

        ``None`` where both have let go of their tensors.
        """
        if other._tensor is not None:
            again = unseen(_reordered, other._tensor, other, self.order)
            return (self, again)
        if self._tensor is not None:
            return unseen(_reordered, self._tensor, self, other.order), other
        return None

    def rounding(self) -> float:
        """The largest distance that another order of summation explains: 1e-4 in float32, a
        multiple of what the type resolves where that is coarser.
        """
        if not self.dtype.is_floating_point:
            return 0.0
        return max(1e-4, 2.5 * torch.finfo(self.dtype).eps)


def unseen(function: Callable[..., _T], *args: Any) -> _T:
    """What the function returns; no mode or subclass of the script's and no autograd sees it work.

    Not a context manager of ours: one that failed between its beginning and the body would leave
    autograd off.
    """
    with torch._C.DisableTorchFunction():
        return unseen_below(function, *args)


def unseen_below(function: Callable[..., _T], *args: Any) -> _T:
    """The same, where there are plain tensors only and no function modes."""
    with torch._C._DisableTorchDispatch():
        on = torch.is_grad_enabled()
        try:
            if on:  # by torch's function itself: its context manager takes twice as long
                torch._C._set_grad_enabled(False)
            return function(*args)
        finally:
            if on:
                torch._C._set_grad_enabled(True)


def _reordered(held: torch.Tensor, print_: Fingerprint, order: tuple[int, ...]) -> Fingerprint:
    """The fingerprint of what is held, with elements that lie in another order."""
    other = held.contiguous()
    if order:
        other = torch.empty_strided(held.shape, order, dtype=held.dtype).copy_(held)
    return Fingerprint(print_.dtype, print_.shape, _bits_here(other, 0), order, other)


def fingerprint(value: torch.Tensor) -> Fingerprint | None:
    """The tensor's fingerprint, to be taken :func:`unseen`, which holds it until it lets go of it.

    ``None`` of one whose elements are nowhere, or not to be had.
    """
    order = () if order_in_memory(value) == () else None
    if order is not None and not is_there(value, dense=True):
        return None
    return _fingerprint_as_it_lies(value, order)


def _fingerprint_as_it_lies(
    value: torch.Tensor, order: tuple[int, ...] | None
) -> Fingerprint | None:
    """The same, without a copy of elements that lie in memory in another order than they count in.

    Compared with another of the kind, they are put in order where they have to be.

    Args:
        value: The tensor, whose memory is there.
        order: Its order in memory.
    """
    if order is not None:
        bits = _bits_here(value, 0)
        return Fingerprint(value.dtype, tuple(value.shape), bits, order, value, None, True)
    parts = plain_parts(value)
    if not parts or any(part.is_quantized or part.is_meta or not is_there(part) for part in parts):
        return None
    bits = 0
    for part in parts:
        for flat in flat_pieces(part):
            bits = _bits(flat, bits)
    # A ragged size has a name of its own in each tensor.
    shape = tuple(size if type(size) is int else -1 for size in value.shape)
    return Fingerprint(value.dtype, shape, bits, (), parts[0])


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


class Keeping(Protocol):
    """A run, as far as a tape knows it."""

    @property
    def keeps(self) -> bool:
        """Whether later runs are compared with it."""


class Prints:
    """Fingerprints that are taken around one call, each once for all tapes.

    Their tensors are held until the call has been noted, so that how far they are from the
    forward's is worked out only where they are not the same.
    """

    def __init__(self, runs: Sequence[Keeping]) -> None:
        """Args: the runs under way, some of which may have to keep what other runs compare with."""
        self._keep = True in [run.keeps for run in runs]
        self._made: dict[int, Fingerprint | None] = {}
        self._parts: dict[int, Part] = {}

    def part(self, tensor: torch.Tensor) -> Part:
        """See :func:`recompute_scan.fidelity.tensors.part_of_memory`."""
        known = self._parts.get(id(tensor))
        if known is None:
            known = self._parts[id(tensor)] = part_of_memory(tensor)
        return known

    def of(self, tensor: torch.Tensor, known: Fingerprint | None = None) -> Fingerprint | None:
        """The fingerprint of a tensor, which stays as it is until :meth:`let_go`.

        Args:
            tensor: Alive until then.
            known: Its fingerprint, where a tape has it.
        """
        key = id(tensor)
        if key in self._made:
            return self._made[key]
        if known is not None:
            print_: Fingerprint | None = known.held(tensor)
        else:
            print_ = _fingerprint_as_it_lies(tensor, self.part(tensor).order)
        self._made[key] = print_
        return print_

    def let_go(self) -> None:
        """The call has been noted."""
        made = [print_ for print_ in self._made.values() if print_ is not None]
        try:
            for print_ in made:
                print_.let_go(keep=self._keep)
        except Exception:  # one that no kernel sums up
            for print_ in made:
                print_.let_go(keep=False)
            raise
