"""Which modules can have a checkpoint of their own: those that have one, and repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct
from torch import nn

from recompute_scan.record.module_names import ModuleIndex, real_class_name, root_modules, unwrapped

_REPEATED_IN = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Chosen(Struct, frozen=True):
    """One such module."""

    module: nn.Module
    name: str
    class_name: str
    checkpointed: bool


def candidates(covered: Sequence[nn.Module]) -> tuple[tuple[Chosen, ...], tuple[str, ...]]:
    """The modules, none inside another, and a sentence for each kind that was left out.

    Args:
        covered: The modules that the script checkpoints today.
    """
    index = ModuleIndex()
    index.rebuild()
    today = {id(unwrapped(module)) for module in covered}
    repeated = [module for root in root_modules() for module in _blocks(root)]
    inside = {id(part): place for place, block in enumerate(repeated) for part in block.modules()}
    picked = list(repeated)
    for module in map(unwrapped, covered):
        parts = {id(part) for part in module.modules()}
        if id(module) not in inside and not any(id(block) in parts for block in repeated):
            picked.append(module)
    found: list[Chosen] = []
    normed: Counter[str] = Counter()
    for module in dict.fromkeys(picked):
        parts = {id(part) for part in module.modules()}
        around = any(
            id(module) in {id(p) for p in one.modules()} for one in map(unwrapped, covered)
        )
        is_covered = bool(parts & today) or around
        kind = real_class_name(module)
        if not is_covered and _updates_buffers(module):
            normed[kind] += 1
            continue
        name = index.look_up([module]).name
        if name:
            found.append(Chosen(module, name, kind, is_covered))
    names = Counter(one.name for one in found)
    remarks = tuple(
        f"{number} of {kind} keep what they save: batch normalization in them would update its "
        "running statistics once more in every recompute."
        for kind, number in normed.items()
    )
    return tuple(one for one in found if names[one.name] == 1), remarks


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost blocks of which a list of the model, or the model itself, has several alike."""
    parts = [part for part in module._modules.values() if part is not None]
    kinds: Counter[str] = Counter()
    if isinstance(module, _REPEATED_IN):
        kinds.update(real_class_name(unwrapped(part)) for part in parts)
    for part in parts:
        one = unwrapped(part)
        if kinds[real_class_name(one)] > 1 and _is_block(one):
            yield one
        else:
            yield from _blocks(part)


def _is_block(module: nn.Module) -> bool:
    """Is it made of several layers? One alone saves little beside what a checkpoint keeps."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    layers = sum(1 for part in module.modules() if not part._modules)
    return layers > 1 and any(True for _ in module.parameters())


def _updates_buffers(module: nn.Module) -> bool:
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
        for part in module.modules()
    )
