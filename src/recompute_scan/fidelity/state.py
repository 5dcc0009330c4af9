"""What modules keep between calls: buffers, and attributes that hold plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from torch import nn

from recompute_scan.faithful import KeptState
from recompute_scan.fidelity.fingerprint import Fingerprint, fingerprint, unseen

# Larger ones (masks, tables of positions) are not looked at: statistics and counters are small.
_LARGEST = 2**20
_PLAIN = (bool, int, float, str, type(None))
# Attributes that every module has of torch; whole modules of torch keep nothing else of the kind.
_TORCHS = frozenset(vars(nn.Module()))


class ModuleState(Struct, frozen=True):
    """The state of a region's modules at one moment, by qualified name."""

    buffers: dict[str, Fingerprint | None]
    attributes: dict[str, object]


def look_at_state(modules: Sequence[tuple[str, nn.Module]]) -> ModuleState:
    """The state of these modules, and of all in them, now."""
    buffers: dict[str, Fingerprint | None] = {}
    attributes: dict[str, object] = {}
    for name, module in _all(modules):
        unseen(_look_at, name, module, buffers, attributes)
    return ModuleState(buffers, attributes)


def _look_at(
    name: str,
    module: nn.Module,
    buffers: dict[str, Fingerprint | None],
    attributes: dict[str, object],
) -> None:
    own = vars(module)
    for key, buffer in own.get("_buffers", {}).items():
        if buffer is not None and buffer.numel() <= _LARGEST:
            buffers[f"{name}.{key}" if name else key] = fingerprint(buffer)
    if type(module).__module__.partition(".")[0] == "torch":
        return
    for key, value in own.items():
        if key not in _TORCHS and isinstance(value, _PLAIN):
            attributes[f"{name}.{key}" if name else key] = value


def _all(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    for name, module in modules:
        for inner, part in module.named_modules():
            yield ".".join(filter(None, (name, inner))), part


def changed_again(
    before: ModuleState, forward: ModuleState, start: ModuleState, recompute: ModuleState
) -> list[KeptState]:
    """What both the forward (from ``before``) and the recompute (from ``start``) have changed."""
    found = []
    for name, last in recompute.buffers.items():
        values = [one.buffers.get(name) for one in (before, forward, start)]
        known = [one for one in (*values, last) if one is not None]
        if len(known) == 4 and _moved(known[0], known[1]) and _moved(known[2], known[3]):
            found.append(KeptState(name, True, *(f"{known[n].mean:.6g}" for n in (0, 1, 3))))
    for name, value in recompute.attributes.items():
        absent: Any = object()
        was, made, began = (one.attributes.get(name, absent) for one in (before, forward, start))
        if absent not in (was, made, began) and was != made and began != value:
            found.append(KeptState(name, False, str(was), str(made), str(value)))
    return found


def _moved(one: Fingerprint, other: Fingerprint) -> bool:
    return not one.same_bits(other)
