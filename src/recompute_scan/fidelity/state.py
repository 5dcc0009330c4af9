"""What modules keep between calls: buffers, and attributes that hold plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from recompute_scan.faithful import KeptState
from recompute_scan.fidelity.elements import plain_parts
from recompute_scan.fidelity.fingerprint import Fingerprint, fingerprint, unseen

# Larger ones (masks, tables of positions) are not looked at: statistics and counters are small.
_LARGEST = 2**20
# Elements whose mean is shown.
_SHOWN = 256
_PLAIN = (bool, int, float, str, type(None))
# Attributes that every module has of torch; whole modules of torch keep nothing else of the kind.
_TORCHS = frozenset(vars(nn.Module()))


class _Buffer(Struct, frozen=True):
    """A buffer at one moment: what tells that it has changed, and some of its elements."""

    print: Fingerprint
    some: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Buffer | None:
        parts = plain_parts(buffer)
        if not parts or max(part.numel() for part in parts) > _LARGEST:
            return None
        print_ = fingerprint(buffer)
        if print_ is None:
            return None
        print_.let_go(keep=False)
        first = parts[0].detach()
        return cls(print_, first.flatten()[:: max(1, first.numel() // _SHOWN)].clone())

    def moved(self, other: _Buffer) -> bool:
        return not self.print.same_bits(other.print)

    def __str__(self) -> str:
        """Their mean; of complex ones that of their sizes."""
        some = self.some.abs() if self.some.is_complex() else self.some
        return f"{float(some.double().mean()) if some.numel() else 0.0:.6g}"


class ModuleState(Struct, frozen=True):
    """The state of a region's modules at one moment, by their names and those of its own."""

    buffers: dict[tuple[str, str], _Buffer]
    attributes: dict[tuple[str, str], object]


def look_at_state(parts: Sequence[tuple[str, nn.Module]]) -> ModuleState:
    """The state of these modules now."""
    found = ModuleState({}, {})
    unseen(_look_at_all, parts, found)
    return found


def _look_at_all(parts: Sequence[tuple[str, nn.Module]], found: ModuleState) -> None:
    for name, module in parts:
        _look_at(name, module, found.buffers, found.attributes)


def _look_at(
    name: str,
    module: nn.Module,
    buffers: dict[tuple[str, str], _Buffer],
    attributes: dict[tuple[str, str], object],
) -> None:
    own = vars(module)
    for key, buffer in own.get("_buffers", {}).items():
        seen = None if buffer is None else _Buffer.of(buffer)
        if seen is not None:
            buffers[name, key] = seen
    if _is_torchs(module):
        return
    for key, value in own.items():
        if key not in _TORCHS and isinstance(value, _PLAIN):
            attributes[name, key] = value


def parts_of(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    """Of these modules and all in them those that may keep something, with qualified names."""
    for name, module in modules:
        for inner, part in module.named_modules():
            if not _is_torchs(part) or any(True for _ in part.buffers(recurse=False)):
                yield _joined(name, inner), part


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def changed_again(
    before: ModuleState, forward: ModuleState, start: ModuleState, recompute: ModuleState
) -> list[KeptState]:
    """What both the forward (from ``before``) and the recompute (from ``start``) have changed."""
    found = []
    for name, last in recompute.buffers.items():
        was, made, began = (one.buffers.get(name) for one in (before, forward, start))
        if was is None or made is None or began is None:
            continue
        if was.moved(made) and began.moved(last):
            shown = unseen(lambda some: [str(one) for one in some], (was, made, last))
            found.append(KeptState(_joined(*name), True, *shown))
    for name, value in recompute.attributes.items():
        absent: Any = object()
        old, new, first = (one.attributes.get(name, absent) for one in (before, forward, start))
        if absent not in (old, new, first) and old != new and first != value:
            found.append(KeptState(_joined(*name), False, str(old), str(new), str(value)))
    return found


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
