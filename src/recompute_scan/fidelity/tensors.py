"""Fingerprints of tensors in bounded memory: the exact bits as one number, and up to 256 others.

The bits show whether two tensors are the same, and the other numbers how far apart they are.
Nothing here keeps a tensor, and the script's modes, subclasses, hooks and autograd see nothing of
it.

The other numbers are the elements where these are few, else sums of all elements with random signs.
Such a random projection keeps distances, give or take 1 / sqrt(2 n) for n sums (W. B. Johnson, J.
Lindenstrauss 1984; with signs instead of normal numbers D. Achlioptas 2003). A tensor has one sum
for 1,024 elements, and never fewer than 32 (off by an eighth) or more than 256 (a twentieth).
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import numpy as np
import torch
from isal import isal_zlib
from msgspec import Struct

# Elements that are looked at together, so that little memory is needed: on the CPU what its cache
# holds, elsewhere what keeps it busy.
TOGETHER, _TOGETHER_ELSEWHERE = 2**18, 2**24
_REAL = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
# Two numbers in a byte, which no kernel can copy: they count as bytes.
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


def is_there(part: torch.Tensor) -> bool:
    """Whether a plain tensor's memory holds all its elements: it may have been given back.

    There is none, either, of zeros that need none, and of tensors that a transform works with.
    """
    if not part.nbytes:
        return True
    last = sum((many - 1) * by for many, by in zip(part.shape, part.stride(), strict=True))
    size = (last + 1) * part.element_size()
    try:
        memory = part.untyped_storage()
        room = memory.nbytes() if memory.data_ptr() else 0
    except (RuntimeError, NotImplementedError):
        return False
    return room - part.storage_offset() * part.element_size() >= size


def order_in_memory(value: torch.Tensor) -> tuple[int, ...] | None:
    """How the elements lie of a tensor that is its memory, byte by byte, as most are.

    ``()`` where they lie in order, else the strides; ``None`` of one with gaps or overlaps.
    """
    if (
        type(value) not in _PLAIN
        or value.dtype not in _REAL
        or not (value.is_cpu or value.is_cuda)
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


def _on_host(value: torch.Tensor) -> bool:
    """Whether this thread can read its memory."""
    return value.is_cpu


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
# NumPy, which begins sooner, sums these types where they lie in this machine's memory.
_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}


class Sums(Struct, eq=False, gc=False):
    """The numbers that are kept of a tensor's elements.

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


def sums_of(part: torch.Tensor, fewest: int = _FEWEST) -> Sums:
    """The sums of a plain tensor, to be taken unseen; never fewer than ``fewest``."""
    size = part.numel() * (2 if part.is_complex() else 1)
    whole = part.numel() <= TOGETHER and order_in_memory(part) == ()
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
    """Sums of elements that lie in order, with signs, and how many elements are not finite."""
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
    rows, more = divmod(len(elements), number)
    sums: _Floats = _signs_here(rows, elements.dtype).dot(
        elements[: rows * number].reshape(rows, number)
    )
    if more:
        sums[:more] += elements[-more:]
    return sums


def _sum_with_signs(flat: torch.Tensor, number: int) -> _Floats:
    rows, more = divmod(flat.numel(), number)
    table = flat.as_strided((rows, number), (number, 1))
    # On a GPU a matrix product may be refused where only deterministic kernels are allowed.
    sums = (table * _signs(rows, flat.device)[:, None]).sum(0)
    if more:
        sums[:more] += flat[-more:]
    return np.array(sums.tolist(), np.float64)


# Sums of a tensor on a GPU, and into how many classes the elements of each are parted. The product
# is no multiple of a model's usual width, so that a class is not one feature of all tokens.
_SUMS, _CLASSES = 251, 62


def class_sums(flat: torch.Tensor) -> torch.Tensor:
    """Signed sums of floating-point numbers, on their device, and plain ones: 2 times ``_SUMS``.

    Numbers are added up by class where they are, one of each in turn, by one kernel; then each
    class gets a sign. Half of the signs are negative, so that a value that all numbers share is in
    the plain sums alone.

    Args:
        flat: They lie in memory in order.
    """
    kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
    if flat.element_size() == 1:  # which no kernel adds up
        flat = flat.to(torch.bfloat16)
    turns, more = divmod(flat.numel(), _SUMS * _CLASSES)
    if turns:
        sums = flat[: flat.numel() - more].view(turns, -1).sum(0, dtype=kind)
    else:
        sums = torch.zeros(_SUMS * _CLASSES, dtype=kind, device=flat.device)
    if more:
        sums[:more].add_(flat[-more:])
    return (sums.view(_CLASSES, _SUMS) * _class_signs(kind, flat.device)).sum(1)


@functools.lru_cache(maxsize=16)
def _class_signs(kind: torch.dtype, device: torch.device) -> torch.Tensor:
    order = _mixed(_SUMS * _CLASSES).reshape(_CLASSES, _SUMS).argsort(axis=0).argsort(axis=0)
    signs = np.where(order < _CLASSES // 2, 1.0, -1.0)
    return torch.tensor(np.stack([signs, np.ones_like(signs)]).tolist(), dtype=kind, device=device)


def _mixed(number: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Numbers of 64 bits in no order, the same in each run (splitmix64, G. Steele 2014)."""
    mixed = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


class LaterSums(Struct, frozen=True, eq=False, gc=False):
    """The result of :func:`class_sums` on its device, and how many numbers it sums."""

    _sums: torch.Tensor
    _size: int

    def read(self) -> Sums:
        """The sums; waits for the GPU."""
        signed, plain = np.array(self._sums.tolist(), np.float64)
        with np.errstate(all="ignore"):
            # As long as the tensor, where it is the same number everywhere.
            return Sums(np.append(signed, plain.sum() / math.sqrt(self._size)))


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
    # Their sum is as large as the sum of random signs, so that a constant is not lost in it.
    excess = (int(signs.sum()) - round(rows**0.5)) // 2
    signs[(signs == (1 if excess > 0 else -1)).nonzero()[: abs(excess), 0]] *= -1
    return signs


_T = TypeVar("_T")


class Fingerprint(Struct, eq=False, gc=False):
    """A tensor's type and shape, its bits as a number, and the sums that give a distance.

    A ragged size is -1 in ``shape``. ``order`` has the strides of a tensor that was looked at as it
    lies in memory, where its elements do not lie in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    _bits: int | LaterNumber
    order: tuple[int, ...] = ()
    _tensor: torch.Tensor | None = None
    _sums: Sums | LaterSums | None = None

    @property
    def bits(self) -> int:
        """A number that depends on every bit and its place."""
        if not isinstance(self._bits, int):
            self._bits = self._bits.read()
        return self._bits

    def same_bits(self, other: Fingerprint) -> bool:
        """Whether both tensors were the same, to the last bit."""
        if self.order != other.order:
            both = self._in_one_order(other)
            return both is not None and both[0].same_bits(both[1])
        same = self.dtype == other.dtype and self.shape == other.shape and self.bits == other.bits
        if same and other._sums is None:
            other._sums = self._sums
        return same

    @property
    def sums(self) -> Sums | None:
        """The sums that give a distance; ``None`` after :meth:`let_go`."""
        if self._sums is None and self._tensor is not None:
            self._sums = unseen(self._sum_up, self._tensor)
        if isinstance(self._sums, LaterSums):
            self._sums = unseen(self._sums.read)
        return self._sums

    def held(self, tensor: torch.Tensor) -> Fingerprint:
        """This, or this in another shape: the same elements are there again, and as they were."""
        if tensor.shape == self.shape:
            self._tensor = tensor
            return self
        shape = tuple(tensor.shape)
        return Fingerprint(self.dtype, shape, self._bits, self.order, tensor, self._sums)

    def let_go(self, *, keep: bool) -> None:
        """The tensor may change from here on; to be called unseen. Comparisons of bits need
        nothing else; with ``keep`` one can be asked for its distance from others still.
        """
        tensor, self._tensor = self._tensor, None
        if keep and self._sums is None and tensor is not None:
            self._sums = self._sum_up(tensor)

    def _sum_up(self, tensor: torch.Tensor) -> Sums | LaterSums | None:
        lying = in_memory(tensor, self.order)
        if not _on_host(tensor):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return None  # a distance of other numbers is never needed
            if lying.is_contiguous() and lying.numel() and not tensor.is_complex():
                return LaterSums(class_sums(lying.view(-1)), lying.numel())
        return sums_of(lying)

    def distance(self, other: Fingerprint) -> float | None:
        """Norm of the difference over this one's norm, of all elements; 0 or more.

        ``None`` for other shapes, or where it is not known any more; infinite where other elements
        are finite. An element that is infinite, or no number, in both counts as the same.
        """
        if self.shape != other.shape:
            return None
        both = (self, other) if self.order == other.order else self._in_one_order(other)
        mine, others = (one.sums for one in both) if both is not None else (None, None)
        return mine.distance(others) if mine is not None and others is not None else None

    def _in_one_order(self, other: Fingerprint) -> tuple[Fingerprint, Fingerprint] | None:
        """Both, one of them taken once more with its elements in the order of the other's.

        ``None`` where both have let go of their tensors.
        """
        if other._tensor is not None:
            return self, unseen(_reordered, other._tensor, other, self.order)
        if self._tensor is not None:
            return unseen(_reordered, self._tensor, self, other.order), other
        return None

    def rounding(self) -> float:
        """The largest distance that another order of summation explains: 1e-4, or 2.5 times the
        resolution of a coarser type.
        """
        real = self.dtype.is_floating_point
        return max(1e-4, 2.5 * torch.finfo(self.dtype).eps) if real else 0.0


def unseen(function: Callable[..., _T], *args: Any) -> _T:
    """Call the function, unseen by modes and subclasses of the script and by autograd.

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


def _reordered(held: torch.Tensor, print_: Fingerprint, order: tuple[int, ...]) -> Fingerprint:
    """The fingerprint of a held tensor, with elements that lie in another order."""
    other = held.contiguous()
    if order:
        other = torch.empty_strided(held.shape, order, dtype=held.dtype, device=held.device)
        other.copy_(held)
    bits = _bits(in_memory(other, order).view(-1), 0)
    return Fingerprint(print_.dtype, print_.shape, bits, order, other)


def fingerprint(value: torch.Tensor) -> Fingerprint | None:
    """The tensor's fingerprint, to be taken :func:`unseen`, which holds it until it lets go of it.

    ``None`` where the elements are nowhere, or cannot be had.
    """
    if order_in_memory(value) == ():
        return fingerprint_as_it_lies(value) if is_there(value) else None
    parts = plain_parts(value)
    if not parts or any(part.is_quantized or part.is_meta or not is_there(part) for part in parts):
        return None
    bits: int | LaterNumber = 0
    for part in parts:
        for flat in flat_pieces(part):
            bits = _bits(flat, bits)
    # A ragged size has another name in each tensor.
    shape = tuple(size if type(size) is int else -1 for size in value.shape)
    return Fingerprint(value.dtype, shape, bits, (), parts[0])


def fingerprint_as_it_lies(value: torch.Tensor) -> Fingerprint | None:
    """The same, without a copy of elements that lie in memory in another order than they count in.

    Compared with another of the kind, they are put in order where they have to be.
    """
    order = order_in_memory(value)
    if order is None:
        return fingerprint(value)
    whole = _bits(value if _on_host(value) else in_memory(value, order).view(-1), 0)
    return Fingerprint(value.dtype, tuple(value.shape), whole, order, value)


def _bits(flat: torch.Tensor, so_far: int | LaterNumber) -> int | LaterNumber:
    """The number of all elements so far: these, which lie in memory in order, and those before."""
    if not flat.numel():
        return so_far
    if _on_host(flat) and isinstance(so_far, int):
        # Not through numpy: torch never again resizes memory that numpy has seen, and FSDP does.
        size = flat.numel() * flat.element_size()
        return isal_zlib.crc32((ctypes.c_char * size).from_address(flat.data_ptr()), so_far)
    ledger = _ledger(flat.device)
    return LaterNumber(ledger, ledger.note(functools.partial(number_of, flat)), so_far)


class LaterNumber(Struct, gc=False):
    """A number that a GPU works out: what a ledger has at a place, after another number."""

    _ledger: Ledger
    _place: int
    _before: int | LaterNumber

    def read(self) -> int:
        """The number; waits for the GPU."""
        before = self._before if isinstance(self._before, int) else self._before.read()
        return (before * 0x2545F4914F6CDD1D + self._ledger.at(self._place)) & (2**64 - 1)


class Ledger:
    """Numbers that one thread has a GPU work out on one stream. All that are there are read at
    once, when one of them is asked for, so that nothing waits for the GPU until then.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._numbers = torch.empty(_LEDGER, dtype=torch.int64, device=device)
        self._used = 0
        self._read: list[int] = []
        self._reading = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether there is no place left."""
        return self._used >= _LEDGER

    def note(self, number_into: Callable[[torch.Tensor], None]) -> int:
        """The place of a number, which this is to leave in the tensor that it is given."""
        number_into(self._numbers[self._used])
        self._used += 1  # from here on who reads, in any thread, reads it too
        return self._used - 1

    def at(self, place: int) -> int:
        """The number at a place; waits for the GPU where it has not been read."""
        with self._reading:
            if place >= len(self._read):
                self._read += unseen(self._rest)
            return self._read[place]

    def _rest(self) -> list[int]:
        rest = self._numbers[len(self._read) : self._used]
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return cast("list[int]", rest.tolist())


class _Ledgers(threading.local):
    def __init__(self) -> None:
        self.of: dict[tuple[torch.device, int], Ledger] = {}


_LEDGER = 4096
_ledgers = _Ledgers()


def _ledger(device: torch.device) -> Ledger:
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    key = device, stream.cuda_stream if stream is not None else 0
    found = _ledgers.of.get(key)
    if found is None or found.full:
        found = _ledgers.of[key] = Ledger(device, stream)
    return found


# Words of 8 bytes that are weighed one by one; rows of a table of more.
_WORDS, _ROWS = 2**14, 1021
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def number_of(flat: torch.Tensor, into: torch.Tensor) -> None:
    """A number that depends on each bit and its place, worked out where the elements are.

    Words of 8 bytes are added up along the rows and along the columns of a table, by two kernels
    that read them where they are, and the sums are mixed and weighed by four small ones. Whatever
    changes three words or fewer changes a sum. The rows overlap a little, so that no word is left
    over. Their length is odd and the sums' highest bits are mixed into lower ones, so that turning
    all signs of a tensor changes the number.

    Args:
        flat: Elements that lie in memory in order.
        into: One number on the same device.
    """
    each = flat.element_size()
    many, more = divmod(flat.numel(), 8 // each)
    if flat.storage_offset() * each % 8:
        flat = flat.clone()
    if more:
        flat, rest = flat[:-more], flat[-more:].view(_INTEGERS[each])
    words = flat.view(torch.int64)
    if many > _WORDS:
        rows, stride, length = table_of(many)
        sums = torch.empty(length + rows + more, dtype=torch.int64, device=flat.device)
        table = words.as_strided((rows, length), (stride, 1))
        torch.sum(table, 0, out=sums[:length])
        torch.sum(table, 1, out=sums[length : length + rows])
        if more:
            sums[length + rows :].copy_(rest)
    else:
        sums = torch.cat((words, rest.to(torch.int64))) if more else words
    mixed = sums >> 31
    mixed.bitwise_xor_(sums).mul_(_weights(sums.numel(), flat.device))
    torch.sum(mixed, 0, out=into)


def table_of(words: int) -> tuple[int, int, int]:
    """Rows, their distance and their odd length, of a table that holds just so many words."""
    rows = _ROWS
    while True:
        stride = words // rows
        length = words - (rows - 1) * stride
        if length % 2:
            return rows, stride, length
        rows += 1


def _weights(number: int, device: torch.device) -> torch.Tensor:
    return _all_weights(max(_WORDS, 1 << (number - 1).bit_length()), device)[:number]


@functools.lru_cache(maxsize=16)
def _all_weights(number: int, device: torch.device) -> torch.Tensor:
    odd = _mixed(number) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
