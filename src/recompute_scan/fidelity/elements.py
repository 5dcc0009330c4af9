"""Where a tensor's elements lie: the plain tensors that hold them, in pieces of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
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
