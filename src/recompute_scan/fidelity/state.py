"""Buffers and other state kept between runs.

What a region may find changed: what its modules keep between calls, and the random states.

The parts of a module and their weights, as ``nn.Module`` lists them.

A module may be one that cannot be hashed (a dataclass that compares), which ``named_modules`` and
all that is made of it cannot list.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import random
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
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
# Elements whose mean is shown.
_SHOWN = 256
# Of these the text tells their state.
_PLAIN = (bool, int, float, str, type(None), itertools.count)
# What a class may count or collect in.
_COUNTERS = (int, float, list, dict, set, deque, Counter, OrderedDict, defaultdict, itertools.count)
# Whose code and objects keep nothing of the script's.
_OTHERS = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "recompute_scan"}
# How far functions are followed that a function calls.
_DEEPEST_CALL = 3
# How far into an attribute is looked.
_DEEPEST, _MOST = 4, 256
# Attributes that every module has of torch; whole modules of torch keep nothing else of the kind.
_TORCHS = frozenset(vars(nn.Module()))
_OWN = "a generator of the script's own"
# Of a Mersenne Twister, and how many of them are looked at.
_WORDS, _SOME = 624, 8
_Words = ctypes.c_uint32 * (_WORDS + 1)
# A number to be found again in memory.
_MARK = 1.2345678901234567e-123


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

    @classmethod
    def of_array(cls, array: Any) -> _Buffer | None:
        """The same of an array of NumPy's; ``None`` where torch has no such type."""
        with suppress(TypeError, ValueError):
            return cls.of(torch.from_numpy(array.copy()))
        return None

    def moved(self, other: _Buffer) -> bool:
        return not self.print.same_bits(other.print)

    def __str__(self) -> str:
        """Their mean; of complex ones that of their sizes."""
        some = self.some.abs() if self.some.is_complex() else self.some
        return f"{float(some.double().mean()) if some.numel() else 0.0:.6g}"


class ModuleState(Struct, frozen=True):
    """What a region may change, at one moment, by the names of its modules and its own."""

    buffers: dict[tuple[str, str], _Buffer]
    attributes: dict[tuple[str, str], _Value]


class _Value(Struct, frozen=True):
    """A plain value, the length of a container, or a tensor, at one moment."""

    content: str = ""
    tensor: _Buffer | None = None

    def same(self, other: _Value) -> bool:
        if self.tensor is not None and other.tensor is not None:
            return not self.tensor.moved(other.tensor)
        return self.tensor is other.tensor and self.content == other.content

    def __str__(self) -> str:
        return self.content if self.tensor is None else str(self.tensor)


def look_at_state(reach: Reach) -> ModuleState:
    """The state of what a region reaches now."""
    found = ModuleState({}, {})
    unseen(_look_at_all, reach, found)
    return found


def _look_at_all(reach: Reach, found: ModuleState) -> None:
    for name, module in reach.parts:
        _look_at(name, module, found)
    for key, value in reach.values():
        _note("", key, value, found.attributes)


def _look_at(name: str, module: nn.Module, found: ModuleState) -> None:
    own = vars(module)
    for key, buffer in own.get("_buffers", {}).items():
        seen = None if buffer is None else _Buffer.of(buffer)
        if seen is not None:
            found.buffers[name, key] = seen
    if _is_torchs(module):
        return
    for key, value in list(own.items()):
        if key not in _TORCHS:
            _note(name, key, value, found.attributes)
    for base in type(module).__mro__:
        if _package(base) in ("torch", "builtins"):
            break
        for key, value in list(vars(base).items()):
            if type(value) in _COUNTERS and not key.startswith("__"):
                _note(name, key, value, found.attributes)


def _note(name: str, key: str, value: object, attributes: dict[tuple[str, str], _Value]) -> None:
    # What lies in it is the script's, and another thread of it may change it now.
    with suppress(Exception):
        attributes |= {(name, f"{key}{step}"): one for step, one in _values_in(value)}


class Reach:
    """What a region's function may change: its modules, and what code that they run refers to.

    Code refers to variables outside by their names: globals, those of a closure, and what a
    function or the object that it is bound to keeps. The functions among these are looked into as
    well, and modules among the globals count as the region's own.

    Attributes:
        parts: Modules that may keep something, with qualified names.
    """

    def __init__(self, function: object, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.parts = list(_parts_of(modules))
        self._met: set[int] = {id(part) for _, part in self.parts}
        self._variables: dict[tuple[int, str], tuple[str, Callable[[], object]]] = {}
        self._follow(function, 0)
        for part in [part for _, part in self.parts]:
            if not _is_torchs(part):
                self._follow(getattr(type(part), "forward", None), 0, type(part))
                for held in list(vars(part).values()):
                    if isinstance(held, (FunctionType, functools.partial)):
                        self._follow(held, 1)

    def values(self) -> Iterator[tuple[str, object]]:
        """What the variables hold now, by their names."""
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
                names = function.__func__.__code__.co_names if _is_python(function) else ()
                self._add((id(bound), ""), type(bound).__name__, bound, depth, names)
            owner, function = type(bound), function.__func__
        function = inspect.unwrap(cast("Any", function)) if callable(function) else function
        if not isinstance(function, FunctionType) or id(function) in self._met:
            return
        if depth > _DEEPEST_CALL or _is_others(function):
            return
        self._met.add(id(function))
        scope, names = function.__globals__, _named_in(function.__code__)
        for name in names:
            if name in scope:
                self._add((id(scope), name), name, scope[name], depth, names, scope)
            if owner is not None:
                self._follow(_static(owner, name), depth + 1, owner)
        for place, one in enumerate((*(function.__defaults__ or ()), *_keywords_of(function))):
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


def _named_in(code: CodeType) -> tuple[str, ...]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(
        dict.fromkeys((*code.co_names, *(name for one in inner for name in _named_in(one))))
    )


def _keywords_of(function: FunctionType) -> Iterable[object]:
    return (function.__kwdefaults__ or {}).values()


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


def _is_array(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) or f"{kind.__module__}.{kind.__name__}" == "numpy.ndarray"


def _is_python(method: MethodType) -> bool:
    return isinstance(method.__func__, FunctionType)


def _package(one: Any) -> str:
    home = one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", "")
    return str(home).partition(".")[0]


def _values_in(value: object) -> Iterator[tuple[str, _Value]]:
    """What an attribute holds: plain values, lengths and tensors, each with the way to it."""
    met: set[int] = set()
    waiting = [("", value, 0)]
    seen = 0
    while waiting and seen < _MOST:
        step, one, depth = waiting.pop()
        kind = type(one)
        seen += 1
        base = next((base for base in _PLAIN if issubclass(kind, base)), None)
        if base is not None:
            yield step, _Value(cast("Any", base).__repr__(one))  # not a subclass's
        elif issubclass(kind, torch.Tensor):
            # A weight changes in the optimizer; looked at it is large.
            buffer = None if issubclass(kind, nn.Parameter) else _Buffer.of(cast("Any", one))
            if buffer is not None:
                yield step, _Value("", buffer)
        elif _is_array(kind):
            buffer = _Buffer.of_array(one)
            if buffer is not None:
                yield step, _Value("", buffer)
        elif id(one) not in met and depth < _DEEPEST and not _is_left_alone(kind):
            met.add(id(one))
            if issubclass(kind, (list, tuple, dict, set, deque)):
                yield step, _Value(f"{len(cast('Any', one))} items")
            inner = list(itertools.islice(parts_of_value(one), _MOST))
            waiting += [(f"{step}{way}", part, depth + 1) for way, part in reversed(inner)]


def _is_left_alone(kind: type) -> bool:
    """Modules have a look of their own, and what torch keeps is torch's."""
    return issubclass(kind, nn.Module) or kind.__module__.partition(".")[0] == "torch"


def _parts_of(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    """Of these modules and all in them those that may keep something, with qualified names."""
    for name, module in modules:
        for inner, part in named_parts(module):
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
            texts = unseen(lambda some: [str(one) for one in some], (was, made, last))
            found.append(KeptState(_joined(*name), True, texts[0], texts[1], texts[2]))
    attributes: set[tuple[str, str]] = set()
    for name, value in recompute.attributes.items():
        old, new, first = (one.attributes.get(name) for one in (before, forward, start))
        attribute = name[0], re.split(r"[.\[]", name[1])[0]
        if old is None or new is None or first is None or attribute in attributes:
            continue
        # What is set to the same again, as a result that is kept to be looked at, is changed once.
        if not (old.same(new) or first.same(value) or new.same(value)):
            attributes.add(attribute)
            texts = unseen(lambda some: [str(one) for one in some], (old, new, value))
            tensor = value.tensor is not None
            found.append(KeptState(_joined(*name), False, texts[0], texts[1], texts[2], tensor))
    return found


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
    """An operator that drew random numbers: whose state, and what it was before."""

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


def _words_of_python() -> tuple[Any, Any] | None:
    """``random``'s generator, with its place and words where they lie; ``None`` if an interpreter
    has them elsewhere. To ask for them takes 15 times as long.
    """
    own, size = random._inst, ctypes.sizeof(_Words)
    if type(own).__basicsize__ < object.__basicsize__ + size:
        return None
    held = _Words.from_address(id(own) + object.__basicsize__)
    return (own, held) if (*held[1:], held[0]) == own.getstate()[1] else None


_PYTHONS = _words_of_python()


def python_states() -> dict[str, int]:
    """A number for the state of ``random`` and, where the script uses it, of ``numpy.random``.

    Both are Mersenne Twisters: 624 words that are drawn from one after the other and then all made
    anew, so that the place and some words tell two states apart. Beside them lies the second of two
    normal numbers, as long as it has not been asked for. What the script has put in their place and
    that has no state is left out.
    """
    found = {}
    own: Any = random._inst
    if _PYTHONS is not None and own is _PYTHONS[0]:
        held = _PYTHONS[1]
        found["random"] = hash((held[0], tuple(held[1 : 1 + _SOME]), own.gauss_next))
    else:
        with suppress(Exception):  # the operating system's numbers have no state
            found["random"] = hash(own.getstate())
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None:
        drawn, generator = numpy._rand, numpy._rand._bit_generator
        if type(generator).__name__ == "MT19937":
            # In its place: to ask for the state takes 50 times as long.
            held = _Words.from_address(generator.ctypes.state_address)
            kind: Any = type(drawn)
            place = _normal_of_numpy(kind)
            normal = ctypes.string_at(id(drawn) + place, 16) if place else b""
            found["numpy.random"] = hash((held[_WORDS], tuple(held[:_SOME]), normal))
        else:
            found["numpy.random"] = hash(str(generator.state))
    return found


@functools.lru_cache(maxsize=4)
def _normal_of_numpy(kind: Any) -> int:
    """Where in a ``RandomState`` it lies whether it keeps a normal number, and behind that the
    number. Sought in one of our own, as no version of numpy says so; 0 if not found.
    """
    if kind.__module__ != "numpy.random.mtrand":
        return 0
    one = kind(0)
    own = (ctypes.c_char * kind.__basicsize__).from_address(id(one))
    seen = []
    for kept in (0, 1):
        one.set_state((*one.get_state()[:3], kept, _MARK))
        seen.append(bytes(own))
    place = seen[1].find(struct.pack("d", _MARK)) - 8
    flags = [struct.unpack_from("i", lies, place)[0] for lies in seen] if place > 0 else []
    return place if flags == [0, 1] else 0
