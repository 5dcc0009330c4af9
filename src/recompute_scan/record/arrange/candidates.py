"""Which modules can have a checkpoint of their own: those that have one, repeated blocks, and the
parts of both, such as a layer's attention and its MLP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct
from torch import nn

from recompute_scan.record.module_names import ModuleIndex, real_class_name, root_modules, unwrapped

_REPEATED_IN = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LISTS = (nn.ModuleList, nn.ModuleDict)
# A decoder's layer has attention, attention to the encoder, an MLP. More are no halves.
_MOST_PARTS = 3


class Chosen(Struct, frozen=True):
    """One such module; ``part_of`` is the place of the one that it is a part of, -1 for none."""

    module: nn.Module
    name: str
    class_name: str
    checkpointed: bool
    part_of: int = -1


def candidates(covered: Sequence[nn.Module]) -> tuple[tuple[Chosen, ...], tuple[str, ...]]:
    """The modules, none inside another, then their parts; a sentence for each kind left out.

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
        inner = {id(part) for part in module.modules()}
        if id(module) not in inside and not any(id(block) in inner for block in repeated):
            picked.append(module)
    found: list[Chosen] = []
    normed: Counter[str] = Counter()
    for module in dict.fromkeys(picked):
        inner = {id(part) for part in module.modules()}
        around = any(
            id(module) in {id(p) for p in one.modules()} for one in map(unwrapped, covered)
        )
        kind = real_class_name(module)
        if not inner & today and not around and _updates_buffers(module):
            normed[kind] += 1
            continue
        name = index.look_up([module]).name
        if name:
            whole = bool(inner & today - {id(part) for part in _parts(module)})
            found.append(Chosen(module, name, kind, whole or around))
    found = _of_one_name(found)
    remarks = tuple(
        f"{number} of {kind} keep what they save: batch normalization in them would update its "
        "running statistics once more in every recompute."
        for kind, number in normed.items()
    )
    return (*found, *_of_one_name(_parts_of(found, today, index))), remarks


def _parts_of(found: Sequence[Chosen], today: set[int], index: ModuleIndex) -> list[Chosen]:
    parts = [(place, part) for place, one in enumerate(found) for part in _parts(one.module)]
    times = Counter(id(part) for _, part in parts)
    return [
        Chosen(part, index.look_up([part]).name, real_class_name(part), id(part) in today, place)
        for place, part in parts
        if times[id(part)] == 1
    ]


def _of_one_name(found: Sequence[Chosen]) -> list[Chosen]:
    """Those whose name is theirs alone."""
    names = Counter(one.name for one in found)
    return [one for one in found if one.name and names[one.name] == 1]


def _parts(module: nn.Module) -> list[nn.Module]:
    """What it is made of, where that is a few modules that are made of others themselves."""
    found: list[nn.Module] = []
    for child in module._modules.values():
        each = child._modules.values() if isinstance(child, _LISTS) else (child,)
        found += [unwrapped(one) for one in each if one is not None]
    found = [one for one in found if one._modules and any(True for _ in one.parameters())]
    if len(found) == 1:  # around the layer's own, as an adapter is
        found = _parts(found[0]) or found
    return found if len(found) <= _MOST_PARTS else []


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
    if isinstance(module, _LISTS):
        return False
    layers = sum(1 for part in module.modules() if not part._modules)
    return layers > 1 and any(True for _ in module.parameters())


def _updates_buffers(module: nn.Module) -> bool:
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
        for part in module.modules()
    )
