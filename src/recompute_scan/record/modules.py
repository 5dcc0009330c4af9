"""Which module a checkpoint covers, and what it is called in the model.

A reentrant checkpoint connects its output to its inputs only. Where no input needs a gradient,
the weights inside get none, torch warns once, and training goes on without them.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from traceback import walk_stack
from types import FunctionType, MethodType
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from recompute_scan.fidelity.state import named_parts, weights
from recompute_scan.record.attribution import variables

# Attributes under which wrappers keep the layer they wrap: FSDP1, the checkpoint and offload
# wrappers, torch.compile.
_WRAPPED_UNDER = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_DEEPEST_CLOSURE = 3


class ModuleName(Struct, frozen=True):
    """Name below the root model and class name, wrappers left out; empty where unknown.

    Where two trained models share names, the model's name comes first.
    """

    name: str = ""
    class_name: str = ""


UNKNOWN = ModuleName()


class ModuleIndex:
    """Names of all modules alive in this process, each in the largest model that holds it."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._misses = 0

    def rebuild(self) -> None:
        roots = root_modules()
        labels = _labels(roots)
        listed = [(labels.get(id(root), ""), list(named_parts(root))) for root in roots]
        self._names = {
            id(module): ".".join(filter(None, (label, plain_name(name))))
            # A larger model's names replace a smaller's.
            for label, names in sorted(listed, key=lambda each: len(each[1]))
            for name, module in names
        }
        self._misses = 0

    def look_up(self, covered: Sequence[nn.Module]) -> ModuleName:
        """The name of one module, or of the run of modules that one checkpoint covers."""
        if not covered:
            return UNKNOWN
        names = [self._name(module) for module in covered]
        if len(covered) == 1:
            return ModuleName(names[0], real_class_name(covered[0]))
        first, last = names[0], names[-1].rpartition(".")[2]
        kinds = dict.fromkeys(real_class_name(module) for module in covered)
        return ModuleName(f"{first}-{last}" if first else "", ", ".join(kinds))

    def name_of(self, module: nn.Module) -> tuple[str, str]:
        """Name and class name of one module."""
        return self._name(module), real_class_name(module)

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(id(module))
        if name is None and self._misses < 2:  # made since the index was built, perhaps
            misses = self._misses + 1
            self.rebuild()
            self._misses = misses
            name = self._names.get(id(module))
        return name or ""


def _labels(roots: list[nn.Module]) -> dict[int, str]:
    """Prefixes for the names in each model, by its id, where two trained models share
    names, as a generator and a discriminator may. A model that is trained has gradients.
    """
    with torch._C.DisableTorchFunction():  # no mode or subclass of the script's sees this look
        trained = [root for root in roots if any(p.grad is not None for p in weights(root))]
    uses = Counter(
        name
        for root in trained
        for name in {plain_name(name) for name, module in named_parts(root)} - {""}
    )
    alike = [
        root for root in trained if any(uses[plain_name(name)] > 1 for name, _ in named_parts(root))
    ]
    if not alike:
        return {}
    return _variables(alike) or _numbered(alike)


def _variables(models: list[nn.Module]) -> dict[int, str]:
    """The variables that hold the models, from the outermost frame that has one for each."""
    # With this frame among them, all would be kept.
    frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
    wanted = {id(model) for model in models}
    for frame in reversed(frames):
        for scope in (variables(frame), frame.f_globals):
            held: dict[int, str] = {}
            for name, value in list(scope.items()):
                if id(value) in wanted and not name.startswith("_"):
                    held.setdefault(id(value), name)
            if len(held) == len(wanted):
                return held
    return {}


def _numbered(models: list[nn.Module]) -> dict[int, str]:
    """Class names, with a number where several are of one class."""
    kinds = [real_class_name(unwrapped(model)) for model in models]
    return {
        id(model): kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: place + 1].count(kind)}"
        for place, (model, kind) in enumerate(zip(models, kinds, strict=True))
    }


def root_modules() -> list[nn.Module]:
    """All modules alive in this process that no other module holds."""
    # type(), because isinstance() asks proxies for their __class__ and may run anything.
    modules = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), nn.Module) and "_modules" in vars(item)
    ]
    held = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in held]


def parameter_names() -> dict[int, str]:
    """The names of all parameters alive, by their numbers; of a layer that is no part of a model
    with its class.
    """
    found: dict[int, str] = {}
    for root in root_modules():
        for name, parameter in root.named_parameters():
            alone = "." not in name
            found[id(parameter)] = f"{real_class_name(root)}.{name}" if alone else plain_name(name)
    return found


def covered_modules(
    function: object, args: Iterable[object] = (), *, every: bool = False
) -> list[nn.Module]:
    """The modules that a checkpointed function runs, as far as it can be seen from outside.

    Looks at the function itself, the object it is bound to, a partial's function and arguments,
    its closure, the call's own arguments, and last its defaults. Wrappers are taken off.

    Args:
        function: The function.
        args: The arguments of the call.
        every: Whether all modules of a closure are wanted, as for what they keep, and not only the
            one that gives the region its name.
    """
    found = _in_function(function, 0, every)
    if not found:
        found = [arg for arg in args if isinstance(arg, nn.Module)][:1]
    if not found and isinstance(function, FunctionType):
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        found = [one for one in _modules(given) if next(one.parameters(), None) is not None][:1]
    return [unwrapped(module) for module in found]


def unwrapped(module: nn.Module) -> nn.Module:
    """The layer inside FSDP, checkpoint and compile wrappers."""
    while not isinstance(module, torch.jit.ScriptModule):  # its parts are in no dictionary
        for attribute in _WRAPPED_UNDER:
            inner = vars(module).get("_modules", {}).get(attribute)
            if inner is not None:
                module = inner
                break
        else:
            break
    return module


def plain_name(name: str) -> str:
    """A qualified name without the parts that wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPED_UNDER]
    while parts and parts[0] == "module":  # DistributedDataParallel, DeepSpeed
        parts = parts[1:]
    return ".".join(parts)


def real_class_name(module: nn.Module) -> str:
    """The class name; FSDP2's ``fully_shard`` makes ``FSDPBlock`` of ``Block``, undone here."""
    kind = type(module)
    if any(base.__name__ == "FSDPModule" for base in kind.__bases__):
        kind = kind.__bases__[-1]
    return kind.__name__


def _in_function(function: Any, depth: int, every: bool) -> list[nn.Module]:
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        bound = _modules([*function.args, *function.keywords.values()])
        return (bound if every else bound[:1]) or _in_function(function.func, depth, every)
    if isinstance(function, MethodType):
        return _modules([function.__self__])
    if isinstance(function, FunctionType) and depth < _DEEPEST_CLOSURE:
        return _in_closure(function, depth, every)
    return []


def _in_closure(function: FunctionType, depth: int, every: bool) -> list[nn.Module]:
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not filled in yet
            continue
    functions, start, end = (cells.get(name) for name in ("functions", "start", "end"))
    if isinstance(functions, (list, tuple, nn.ModuleList, nn.Sequential)) and isinstance(
        start, int
    ):
        # The closure of checkpoint_sequential, and of timm's: functions[start] to functions[end].
        return _modules(list(functions)[start : (end + 1) if isinstance(end, int) else None])
    modules = [value for value in cells.values() if isinstance(value, nn.Module)]
    if modules:
        inner = _innermost(modules)
        return inner if every else inner[:1]
    for value in cells.values():
        found = _in_function(value, depth + 1, every)
        if found:
            return found
    return []


def _innermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Of `self` and blocks of it, the blocks."""
    if len(modules) == 1:
        return modules
    inside = [{id(part) for name, part in named_parts(module) if name} for module in modules]
    held = {id(module) for module in modules}
    return [one for one, parts in zip(modules, inside, strict=True) if not parts & held] or modules


def _modules(values: Iterable[object]) -> list[nn.Module]:
    return [value for value in values if isinstance(value, nn.Module)]


class Untrained:
    """Looks for such weights, in regions that were entered without an input that needs a gradient.

    Attributes:
        suspected: Whether there was such a region at all, in training mode.
        names: Modules with trainable weights that have no gradient after a backward pass, in
            a model with other weights that have one.
    """

    def __init__(self) -> None:
        self.suspected = False
        self.names: tuple[str, ...] = ()
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._looked: set[int] = set()

    def entered(self, function: object, args: Iterable[object]) -> None:
        """A reentrant region is entered with these arguments; no argument needs a gradient."""
        for module in covered_modules(function, args):
            if module.training and any(p.requires_grad for p in weights(module)):
                self.suspected = True
                self._modules.setdefault(id(module), weakref.ref(module))

    def look(self) -> None:
        """A step has ended and its gradients are still there."""
        new = {key: ref() for key, ref in self._modules.items() if key not in self._looked}
        if not new:
            return
        self._looked |= set(new)
        missing = {
            key
            for key, module in new.items()
            if module is not None
            and all(p.grad is None for p in weights(module) if p.requires_grad)
        }
        if missing:
            self.names += tuple(_named(missing))


def _named(modules: set[int]) -> list[str]:
    """Names of the modules, in models that are being trained otherwise."""
    return [
        plain_name(name) or type(module).__name__
        for root in root_modules()
        if any(parameter.grad is not None for parameter in weights(root))
        for name, module in named_parts(root)
        if id(module) in modules
    ]
