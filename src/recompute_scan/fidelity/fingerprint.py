"""What is kept of a tensor in its place: its exact bits as one number, and up to 256 others.

The bits tell whether two tensors are the same; :mod:`recompute_scan.fidelity.sums`, how far apart
they are. Nothing here keeps a tensor, and nothing that looks at one is seen by modes, subclasses,
hooks or the autograd of the script.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from isal import isal_zlib
from msgspec import Struct

from recompute_scan.fidelity.elements import (
    Part,
    flat_pieces,
    in_memory,
    is_there,
    order_in_memory,
    part_of_memory,
    plain_parts,
)
from recompute_scan.fidelity.sums import Sums, sums_of

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
        """See :func:`recompute_scan.fidelity.elements.part_of_memory`."""
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
