"""Gradients and buffers after the first step, for ``--verify``: a sample of each, in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import nn

from recompute_scan.faithful import Sampled, write_sampled
from recompute_scan.fidelity.elements import plain_parts
from recompute_scan.fidelity.fingerprint import fingerprint, unseen
from recompute_scan.fidelity.sums import MOST, sums_of
from recompute_scan.record.guard import Guard
from recompute_scan.record.module_names import plain_name, real_class_name, root_modules


class GradientWatch:
    """Looks once, at the end of the first step, while its gradients are there."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._seen: tuple[Sampled, ...] | None = None

    def look(self) -> None:
        """A step has ended; only the first one is looked at."""
        if self._seen is None:
            self._seen = ()
            with self._guard.part("Gradients could not be kept"):
                self._seen = unseen(lambda: tuple(_sampled()))

    def write(self, folder: Path, rank: int) -> None:
        """Leave what was seen in the run's folder."""
        if self._seen:
            write_sampled(folder, rank, self._seen)


def _sampled() -> Iterator[Sampled]:
    """The samples; of several with one name, as in models of one class, each has its number."""
    met: Counter[tuple[str, bool]] = Counter()
    for one in _named():
        met[one.name, one.is_buffer] += 1
        number = met[one.name, one.is_buffer]
        yield one if number == 1 else replace(one, name=f"{one.name} ({number})")


def _named() -> Iterator[Sampled]:
    roots = root_modules()
    uses = Counter(
        plain_name(name) for root in roots for name, _ in root.named_parameters(recurse=True)
    )
    for root in roots:
        kind = real_class_name(root)
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                known = plain_name(name)
                yield _one(f"{kind}.{known}" if uses[known] > 1 else known, parameter.grad)
        for name, buffer in _buffers(root):
            yield _one(plain_name(name), buffer, is_buffer=True)


def _buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in root.named_buffers():
        if not buffer.is_complex():
            yield name, buffer


def _one(name: str, tensor: torch.Tensor | None, *, is_buffer: bool = False) -> Sampled:
    seen = fingerprint(tensor) if tensor is not None else None
    parts = plain_parts(tensor) if tensor is not None else None
    if seen is None or not parts:
        return Sampled(name, is_buffer)
    values = tuple(sums_of(parts[0], fewest=MOST).values.tolist())
    return Sampled(name, is_buffer, seen.bits, values, seen.rounding())
