"""State that a region's runs may change: buffers, attributes, variables and random states.

Also the parts of a module and their weights. ``named_modules`` cannot list a module that cannot be
hashed, such as a dataclass that compares; these functions can.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pickle import dumps
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from isal import isal_zlib
from msgspec import Struct
from torch import nn

from recompute_scan.fidelity.operators import parts_of_value
from recompute_scan.fidelity.tensors import Fingerprint, fingerprint, plain_parts, unseen
from recompute_scan.result.fidelity import KeptState


def named_parts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name below the root and module, itself first under an empty name, each module once."""
    met = {id(root)}
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        yield name, module
        inner = []
        for key, part in module._modules.items():
            if part is not None and id(part) not in met:
                met.add(id(part))
                inner.append((f"{name}.{key}" if name else key, part))
        waiting += reversed(inner)


def named_weights(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name below the root and parameter, each once."""
    met = set()
    for name, module in named_parts(root):
        for key, weight in module._parameters.items():
            if weight is not None and id(weight) not in met:
                met.add(id(weight))
                yield (f"{name}.{key}" if name else key), weight


def weights(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of its parts, each once."""
    return (weight for _, weight in named_weights(root))


# Larger ones (masks, tables of positions) are not looked at: statistics and counters are small.
_LARGEST = 2**20
# The mean of this many elements is shown.
_SHOWN = 256
# The text of such a value is its state.
_PLAIN = (bool, int, float, str, type(None), itertools.count)
# A class may count or collect in these.
_COUNTERS = (int, float, list, dict, set, deque, Counter, OrderedDict, defaultdict, itertools.count)
# Code and objects of these packages keep nothing of the script's.
_OTHERS = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "recompute_scan"}
# How far functions are followed that a function calls.
_DEEPEST_CALL = 3
# How far into an attribute is looked.
_DEEPEST, _MOST = 4, 256
# Attributes that every module has of torch; whole modules of torch keep nothing else of the kind.
_TORCHS = frozenset(vars(nn.Module()))
_OWN = "a generator of the script's own"


class _Buffer(Struct, frozen=True):
    """A tensor at one moment: a fingerprint, to see whether it changes, and some elements."""

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

    def __str__(self) -> str:
        """The mean of the elements, or of their sizes where they are complex."""
        some = self.some.abs() if self.some.is_complex() else self.some
        return f"{float(some.double().mean()) if some.numel() else 0.0:.6g}"


# The text of a plain value, the length of a container, or a tensor, each at one moment.
_Value = str | _Buffer


def _differ(one: _Value, other: _Value) -> bool:
    if isinstance(one, _Buffer) and isinstance(other, _Buffer):
        return not one.print.same_bits(other.print)
    return one is not other and one != other


# The values that a region may change, at one moment: by whether each is a buffer, its module's name
# and its own.
State = dict[tuple[bool, str, str], _Value]


def look_at_state(reach: Reach) -> State:
    """The state that a region reaches now."""
    found: State = {}

    def look() -> None:
        for name, module in reach.parts:
            _look_at(name, module, found)
        for key, value in reach.values():
            _note("", key, value, found)

    unseen(look)
    return found


def _look_at(name: str, module: nn.Module, found: State) -> None:
    own = vars(module)
    for key, buffer in own.get("_buffers", {}).items():
        seen = None if buffer is None else _Buffer.of(buffer)
        if seen is not None:
            found[True, name, key] = seen
    if _is_torchs(module):
        return
    for key, value in list(own.items()):
        if key not in _TORCHS:
            _note(name, key, value, found)
    for base in type(module).__mro__:
        if _package(base) in ("torch", "builtins"):
            break
        for key, value in list(vars(base).items()):
            if type(value) in _COUNTERS and not key.startswith("__"):
                _note(name, key, value, found)


def _note(name: str, key: str, value: object, found: State) -> None:
    # Another thread of the script may change the value now.
    with suppress(Exception):
        found |= {(False, name, f"{key}{step}"): one for step, one in _values_in(value)}


class Reach:
    """The state that a region's function may change: its modules, and variables of their code.

    Code refers to variables outside by their names: globals, variables of a closure, and what a
    function or the object that it is bound to keeps. The functions among these are looked into as
    well, and modules among the globals count as the region's.

    Attributes:
        parts: Modules that may keep something, with qualified names.
        generators: Random generators of ``random`` and NumPy that the script made, by their names.
    """

    def __init__(self, function: object, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.parts = list(_parts_of(modules))
        self.generators: dict[str, object] = {}
        self._met: set[int] = {id(part) for _, part in self.parts}
        self._variables: dict[tuple[int, str], tuple[str, Callable[[], object]]] = {}
        self._follow(function, 0)
        for part_name, part in list(self.parts):
            if not _is_torchs(part):
                forward = _static(type(part), "forward")
                self._follow(forward, 0, type(part))
                names = named_in(forward.__code__) if isinstance(forward, FunctionType) else ()
                for key, held in list(vars(part).items()):
                    kind = type(held)
                    if _is_generator(kind):
                        self.generators[_joined(part_name, key)] = held
                    elif isinstance(held, (FunctionType, functools.partial)):
                        self._follow(held, 1)
                    elif not (issubclass(kind, nn.Module) or _is_others(kind)):
                        for method in names:
                            self._follow(_static(kind, method), 1, kind)

    def values(self) -> Iterator[tuple[str, object]]:
        """The present values of the variables, by their names."""
        for name, get in self._variables.values():
            value = get()
            if isinstance(value, (FunctionType, type)):
                yield from ((f"{name}.{key}", one) for key, one in list(vars(value).items()))
            else:
                yield name, value

    def _follow(self, function: object, depth: int, owner: type | None = None) -> None:
        """Note what a function refers to, and what the functions do that it calls."""
        if isinstance(function, functools.partial):
            for one in (*function.args, *function.keywords.values(), function.func):
                self._add(("", id(one)), "", one, depth, ())
            return
        if isinstance(function, MethodType):
            bound: Any = function.__self__
            if not isinstance(bound, (nn.Module, type)):
                code = getattr(function.__func__, "__code__", None)
                names = code.co_names if isinstance(code, CodeType) else ()
                self._add((id(bound), ""), type(bound).__name__, bound, depth, names)
            owner, function = type(bound), function.__func__
        if callable(function) and not hasattr(type(function), "__getattr__"):  # may run anything
            function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or id(function) in self._met:
            return
        if depth > _DEEPEST_CALL or _is_others(function):
            return
        self._met.add(id(function))
        scope, names = function.__globals__, named_in(function.__code__)
        for name in names:
            if name in scope:
                self._add((id(scope), name), name, scope[name], depth, names, scope)
            if owner is not None:
                self._follow(_static(owner, name), depth + 1, owner)
        keywords = (function.__kwdefaults__ or {}).values()
        for place, one in enumerate((*(function.__defaults__ or ()), *keywords)):
            self._add((id(function), place), f"argument {place}", one, depth, names)
        freevars = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in freevars:
            with suppress(ValueError):  # not filled in yet
                if not isinstance(cell.cell_contents, nn.Module):  # the region's own, if it runs
                    self._add((id(cell), name), name, cell.cell_contents, depth, names, cell)

    def _add(
        self,
        key: tuple[Any, Any],
        name: str,
        value: object,
        depth: int,
        names: Collection[str],
        scope: Any = None,
    ) -> None:
        kind = type(value)
        if issubclass(kind, nn.Module):
            self._add_module(name, cast("nn.Module", value))
            return
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._follow(value, depth + 1)
        elif isinstance(value, ModuleType):
            # Of a module of the script's, the variables that the code names.
            if not _is_others(value) and depth <= _DEEPEST_CALL:
                held = vars(value)
                for inner in set(names) & held.keys():
                    again = (id(held), inner)
                    self._add(again, f"{name}.{inner}", held[inner], depth + 1, (), held)
            return
        elif _is_generator(kind):
            self.generators[name] = value
            return
        elif not _may_keep(value, kind):
            return
        for method in names:
            self._follow(_static(kind, method), depth + 1, kind)
        for one in parts_of_value(value) if depth <= _DEEPEST_CALL else ():
            if isinstance(one[1], nn.Module) and one[0].lstrip(".") in names:
                self._add_module(f"{name}{one[0]}", one[1])
        if isinstance(scope, dict):
            self._variables.setdefault(key, (name, functools.partial(scope.get, key[1])))
        elif scope is not None:
            self._variables.setdefault(key, (name, functools.partial(_content, scope)))
        else:
            self._variables.setdefault(key, (name, lambda: value))

    def _add_module(self, name: str, module: nn.Module) -> None:
        for part in _parts_of([(name, module)]):
            if id(part[1]) not in self._met and len(self.parts) < _MOST:
                self._met.add(id(part[1]))
                self.parts.append(part)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # emptied since
        return None


def named_in(code: CodeType) -> tuple[str, ...]:
    """The names in code and in the functions that it defines, each once."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(
        dict.fromkeys((*code.co_names, *(name for one in inner for name in named_in(one))))
    )


def _static(kind: type, name: str) -> object:
    """An attribute of a class as it was written, from the class itself or one below it."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _may_keep(value: object, kind: type) -> bool:
    """May it change in a call of the script's functions?"""
    if isinstance(value, type):
        return not (issubclass(value, nn.Module) or _is_others(value))
    return kind in _COUNTERS or _is_array(kind) or not _is_others(kind)


def _is_others(one: object) -> bool:
    """Is it torch's, Python's or NumPy's, and nothing that a script counts in?"""
    return _package(one) in _OTHERS


def _is_generator(kind: type) -> bool:
    """Is it one of Python's or NumPy's random generators?"""
    known = ("numpy.random._generator.Generator", "numpy.random.mtrand.RandomState")
    return kind is random.Random or f"{kind.__module__}.{kind.__name__}" in known


def _is_array(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) or f"{kind.__module__}.{kind.__name__}" == "numpy.ndarray"


def _package(one: Any) -> str:
    home = one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", "")
    return str(home).partition(".")[0]


def _values_in(value: object) -> Iterator[tuple[str, _Value]]:
    """The plain values, lengths and tensors in an attribute, each with the way to it."""
    met: set[int] = set()
    waiting = [("", value, 0)]
    seen = 0
    while waiting and seen < _MOST:
        step, one, depth = waiting.pop()
        kind = type(one)
        seen += 1
        base = next((base for base in _PLAIN if issubclass(kind, base)), None)
        if base is not None:
            yield step, cast("Any", base).__repr__(one)  # not a subclass's
        elif issubclass(kind, nn.Parameter):
            continue  # the optimizer changes it, and it is large
        elif _is_array(kind):
            tensor: Any = one
            buffer = None
            with suppress(TypeError, ValueError):  # an array of a type that torch does not have
                if not issubclass(kind, torch.Tensor):
                    tensor = torch.from_numpy(tensor.copy())
                buffer = _Buffer.of(tensor)
            if buffer is not None:
                yield step, buffer
        # Modules are looked at by themselves, and the script keeps nothing in torch's objects.
        elif not (id(one) in met or depth >= _DEEPEST or issubclass(kind, nn.Module)):
            if _package(kind) == "torch":
                continue
            met.add(id(one))
            if issubclass(kind, (list, tuple, dict, set, deque)):
                yield step, f"{len(cast('Any', one))} items"
            inner = list(itertools.islice(parts_of_value(one), _MOST))
            waiting += [(f"{step}{way}", part, depth + 1) for way, part in reversed(inner)]


def _parts_of(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    """Of these modules and all in them those that may keep something, with qualified names."""
    for name, module in modules:
        for inner, part in named_parts(module):
            if not _is_torchs(part) or any(True for _ in part.buffers(recurse=False)):
                yield _joined(name, inner), part


def _is_torchs(module: nn.Module) -> bool:
    return _package(type(module)) == "torch"


def changed_again(before: State, forward: State, start: State, recompute: State) -> list[KeptState]:
    """The state that both the forward (from ``before``) and the recompute (from ``start``) change.

    Of several values in one attribute, the first.
    """
    found: dict[tuple[bool, str, str], KeptState] = {}
    for key, last in recompute.items():
        if not (key in before and key in forward and key in start):
            continue
        is_buffer, module, name = key
        old, new = before[key], forward[key]
        # An attribute that is set to the same value again, such as a kept result, changes once.
        changed = _differ(old, new) and _differ(start[key], last)
        if changed and (is_buffer or _differ(new, last)):
            attribute = name if is_buffer else re.split(r"[.\[]", name)[0]
            texts = unseen(lambda some: [str(one) for one in some], (old, new, last))
            tensor = not is_buffer and isinstance(last, _Buffer)
            state = KeptState(
                _joined(module, name), is_buffer, texts[0], texts[1], texts[2], tensor
            )
            found.setdefault((is_buffer, module, attribute), state)
    return [*found.values()]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _generator_of(operator_kwargs: dict[str, Any], device: torch.device | None) -> tuple[Any, str]:
    """The generator that an operator on this device draws from, and what to call it.

    ``None`` instead of a generator where it cannot be asked.
    """
    own = operator_kwargs.get("generator")
    if own is not None:
        return own, _OWN
    if device is None or device.type == "cpu":
        return torch.default_generator, "torch (cpu)"
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index], "torch (cuda)"
    return None, f"torch ({device.type})"


def _state_of(generator: Any) -> int | None:
    """A number that differs where the generator's state does."""
    if generator is None:
        return None
    return int(isal_zlib.crc32(unseen(generator.get_state).numpy()))


class RandomDraw(Struct, frozen=True):
    """An operator that drew random numbers: the generator, and its state before."""

    generator: str
    before: int


class Drawn:
    """Sees whether an operator draws random numbers: its generator's state before and after."""

    def __init__(self, arguments: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> None:
        device = arguments[0].device if arguments else kwargs.get("device")
        self._generator, self._name = _generator_of(kwargs, device)
        self._before = _state_of(self._generator)

    def outcome(self) -> RandomDraw | None:
        """After the call: what was drawn, if anything."""
        if self._before is None or _state_of(self._generator) == self._before:
            return None
        return RandomDraw(self._name, self._before)


def python_states(generators: Mapping[str, object]) -> dict[str, int]:
    """A number for the state of ``random`` and, where the script uses it, of ``numpy.random``, and
    for each of these generators.

    A generator that has no state is left out, also one that the script has put in their place.
    """
    found = {}
    with suppress(Exception):  # the operating system's numbers have no state
        found["random"] = hash(random._inst.getstate())
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None:
        state = numpy._rand.get_state(legacy=False)
        found["numpy.random"] = hash(dumps(state))
    for name, one in generators.items():
        with suppress(Exception):
            found[name] = hash(dumps(one))
    return found
