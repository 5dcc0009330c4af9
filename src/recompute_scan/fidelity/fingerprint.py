"""What is kept of a tensor in its place: its exact bits as one number, and a few of its elements.

The bits tell whether two tensors are the same. A sample of 256 elements, the same places in both,
tells how far apart they are. Nothing here keeps a tensor, and nothing that looks at one is seen by
modes, subclasses, hooks or the autograd of the script.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from isal import isal_zlib
from msgspec import Struct

_T = TypeVar("_T")
_SAMPLE = 256
_COLUMNS = 1024
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)}


class Fingerprint(Struct, frozen=True, eq=False):
    """A tensor's type and shape, its bits as a number, and elements spread over it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int
    sample: torch.Tensor

    def same_bits(self, other: Fingerprint) -> bool:
        """Whether both tensors were the same, to the last bit."""
        mine, others = (self.bits, self.dtype, self.shape), (other.bits, other.dtype, other.shape)
        return mine == others

    def distance(self, other: Fingerprint) -> float | None:
        """Norm of the difference over this one's norm, from the samples; 0 or more.

        ``None`` for other shapes; infinite where other elements are finite. What is infinite, or no
        number, in both counts as the same.
        """
        if self.shape != other.shape:
            return None
        return unseen(self._distance, other)

    def _distance(self, other: Fingerprint) -> float:
        mine, others = self.sample.double(), other.sample.double()
        finite = mine.isfinite() & others.isfinite()
        if not torch.equal(mine.isfinite(), others.isfinite()):
            return float("inf")
        mine, others = mine[finite], others[finite]
        norm = float(mine.norm())
        apart = float((mine - others).norm())
        return apart / norm if norm else (float("inf") if apart else 0.0)

    def rounding(self) -> float:
        """The largest distance that another order of summation explains: 1e-4 in float32, a
        multiple of what the type resolves where that is coarser.
        """
        if not self.dtype.is_floating_point:
            return 0.0
        return max(1e-4, 2.5 * torch.finfo(self.dtype).eps)

    @property
    def mean(self) -> float:
        """Mean of the sampled elements."""
        return unseen(self._mean)

    def _mean(self) -> float:
        return float(self.sample.double().mean()) if self.sample.numel() else 0.0


def unseen(function: Callable[..., _T], *args: Any) -> _T:
    """What the function returns; no mode or subclass of the script's and no autograd sees it work.

    Not a context manager of ours: one that failed between its beginning and the body would leave
    autograd off.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        return function(*args)


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is no subclass, so that a kernel can read it as it is."""
    return type(value) in _PLAIN


def plain_parts(value: Any) -> list[torch.Tensor] | None:
    """The plain tensors that hold a tensor's elements; ``None`` where they cannot be had."""
    if is_plain(value):
        return [value]
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
    """The tensor's fingerprint, to be taken :func:`unseen`.

    ``None`` of one whose elements are nowhere, or not to be had.
    """
    parts = plain_parts(value)
    if not parts or any(_has_no_elements(part) for part in parts):
        return None
    flat = [_flat(part) for part in parts]
    bits = _bits(flat[0])
    for part in flat[1:]:
        bits = isal_zlib.crc32(_bits(part).to_bytes(8, "little"), bits)
    # A ragged size has a name of its own in each tensor.
    shape = tuple(size if type(size) is int else -1 for size in value.shape)
    return Fingerprint(value.dtype, shape, bits, _sample(flat[0]))


def _has_no_elements(part: torch.Tensor) -> bool:
    return part.layout != torch.strided or part.is_quantized or part.device.type == "meta"


def _flat(part: torch.Tensor) -> torch.Tensor:
    part = part.detach()
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    elif part.is_neg():
        part = part.resolve_neg()
    return part.contiguous().view(-1)


def _sample(flat: torch.Tensor) -> torch.Tensor:
    """A copy, which keeps nothing of the tensor alive."""
    # An odd step, so that it does not stay in one column of a matrix.
    step = (flat.numel() // _SAMPLE) | 1
    count = min(_SAMPLE, -(-flat.numel() // step))
    return flat.as_strided((count,), (step,), flat.storage_offset()).clone()


def _bits(flat: torch.Tensor) -> int:
    if not flat.numel():
        return 0
    if flat.device.type == "cpu":
        # Not through numpy: torch never again resizes memory that numpy has seen, and FSDP does.
        size = flat.numel() * flat.element_size()
        return isal_zlib.crc32((ctypes.c_char * size).from_address(flat.data_ptr()))
    return _weighted_sums(flat.view(_SAME_SIZE[flat.element_size()]))


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
