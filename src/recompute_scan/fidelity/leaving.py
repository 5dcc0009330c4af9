"""What leaves a reentrant checkpoint without the gradient that it would have, and is used.

A reentrant checkpoint runs its block with autograd off, and gives a gradient to what its autograd
function returns: tensors, side by side, and only where one of its inputs needs a gradient. A tensor
that leaves in any other way (inside a tuple, a dictionary or an object, as an attribute of a module,
or from inputs none of which needs one) has none. Nothing is lost by that unless a loss depends on
it. So tensors that autograd would have followed are followed here, from the block to the loss, as
autograd does: through operators, not through ``detach`` or where gradients are switched off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MemberDescriptorType
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recompute_scan.faithful import LostGradient, Operation
from recompute_scan.fidelity.operators import kind_of, tensors
from recompute_scan.fidelity.watch import NameOf, called_at, in_own_function

_DEEPEST, _MOST = 6, 4096
_take: Callable[[], Any] = getattr(torch.utils._python_dispatch, "_pop_mode", lambda: None)
_put: Callable[[Any], None] = getattr(torch.utils._python_dispatch, "_push_mode", lambda _: None)
_count: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


class Applied(Struct, eq=False):
    """One call of a reentrant checkpoint's autograd function, made while gradients were on.

    Attributes:
        under_way: Whether it has not returned.
        level: How many ``no_grad`` were around its block when that began; ``None`` outside of it.
        weights: What its block used that needs a gradient and was made by no operator.
        names: Where in what the block returned a tensor is, by the tensor's number.
        lost: Tensors that left without their gradient and that a loss depends on.
        alone: Whether nothing that it returned has a gradient.
        tell: Who wants to know what was lost.
    """

    under_way: bool = True
    level: int | None = None
    weights: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    lost: dict[str, Operation] = field(default_factory=dict)
    alone: bool = False
    tell: Callable[[LostGradient], None] | None = None


class _Leak(Struct, eq=False, frozen=True):
    """A tensor that left, by the name that it left under, and where it was used first."""

    applied: Applied
    name: str
    used: Operation


class _Marks(Struct, eq=False, frozen=True):
    """What is known of a tensor: the block that made it, and leaks that it depends on."""

    tensor: weakref.ref[torch.Tensor]
    made_in: Applied | None
    leaks: frozenset[_Leak]


class Leaving:
    """Follows what leaves, in one thread of the step that is compared."""

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
        self._marks: dict[int, _Marks] = {}
        self._applied: list[Applied] = []
        self._mode: _Following | None = None
        self._leaks: dict[_Leak, None] = {}
        self.switched_off = 0
        self.all: list[Applied] = []

    @property
    def innermost(self) -> Applied | None:
        """The call that is under way."""
        return self._applied[-1] if self._applied else None

    @contextmanager
    def applying(self) -> Iterator[Callable[[Any], None]]:
        """Around a call of the autograd function; tell what it returns."""
        if not torch.is_grad_enabled():  # what is computed here has no gradient anyway
            yield lambda _: None
            return
        applied = Applied()
        self._begin()
        self._applied.append(applied)
        self.all.append(applied)

        def returned(result: Any) -> None:
            applied.alone = not any(one.requires_grad for one in tensors((result,)))

        try:
            yield returned
        finally:
            applied.under_way = False
            self._applied.remove(applied)

    @contextmanager
    def block(self) -> Iterator[Callable[[Any], None] | None]:
        """Around what it runs; tell what that returns."""
        applied = self.innermost
        if applied is None or applied.level is not None:
            yield None
            return
        applied.level = self.switched_off

        def returned(result: Any) -> None:
            for name, tensor in tensors_in(result, "output"):
                applied.names.setdefault(id(tensor), name)

        try:
            yield returned
        finally:
            applied.level = None

    def _begin(self) -> None:
        if self._mode is None:
            self._mode = _Following(self)
            below = [_take() for _ in range(_count())]
            # Below all others, so that whoever leaves a mode of theirs leaves that one.
            for mode in (self._mode, *reversed(below)):
                _put(mode)

    def end(self) -> None:
        """Follow nothing any more."""
        mode, self._mode = self._mode, None
        if mode is not None:
            found = [_take() for _ in range(_count())]
            for one in reversed(found):
                if one is not mode:
                    _put(one)
        self._marks.clear()

    def differentiated(self, roots: Sequence[torch.Tensor]) -> None:
        """A backward pass begins at these."""
        for root in roots:
            marks = self._known(root)
            for leak in marks.leaks if marks is not None else ():
                leak.applied.lost.setdefault(leak.name, leak.used)
        self.end()

    def _known(self, tensor: torch.Tensor) -> _Marks | None:
        marks = self._marks.get(id(tensor))
        return marks if marks is not None and marks.tensor() is tensor else None

    def follow(self, name: str, given: Sequence[torch.Tensor]) -> _Marks | None:
        """What to note of the results of an operator that is called with these."""
        inside = self.innermost
        leaks: set[_Leak] = set()
        needed = False
        for one in given:
            marks = self._known(one)
            if marks is not None:
                leaks |= marks.leaks
                made_in = marks.made_in
                if made_in is inside:
                    needed = needed or inside is not None
                elif made_in is not None and not (made_in.under_way or one.requires_grad):
                    if not self._differentiates(inside):
                        continue
                    label = made_in.names.get(id(one), "")
                    leaks.add(_Leak(made_in, label, called_at(name, self._name_of)))
            if one.requires_grad and inside is not None:
                needed = True
                if one.is_leaf:
                    inside.weights.setdefault(id(one), weakref.ref(one))
        if not (needed or leaks) or not self._differentiates(inside):
            return None
        return _Marks(_NOWHERE, inside, frozenset(leaks))

    def _differentiates(self, inside: Applied | None) -> bool:
        if inside is None:
            return torch.is_grad_enabled() or in_own_function()
        return inside.level in (None, self.switched_off) or in_own_function()

    def note(self, marks: _Marks | None, made: Sequence[torch.Tensor]) -> None:
        """Note it of the results."""
        for one in made:
            if marks is not None and (one.is_floating_point() or one.is_complex()):
                self._marks[id(one)] = _Marks(weakref.ref(one), marks.made_in, marks.leaks)
            else:
                self._marks.pop(id(one), None)


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator from the first reentrant checkpoint to the backward pass."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code is compiled as without this mode."""
        return True

    def __init__(self, leaving: Leaving) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._leaving: Leaving | None = leaving

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        leaving, marks = self._leaving, None
        kind = kind_of(func)
        if leaving is not None:
            try:
                if kind.derives and "detach" not in kind.name:
                    marks = leaving.follow(kind.name, tensors((*args, *named.values())))
            except Exception:
                leaving = self._leaving = None  # nothing more is followed, and nothing said
        result = func(*args, **named)
        if leaving is not None:
            try:
                leaving.note(marks, tensors((result,)))
            except Exception:
                self._leaving = None
        return result


def _nowhere() -> weakref.ref[torch.Tensor]:
    return weakref.ref(torch.empty(0))


_NOWHERE = _nowhere()


def tensors_in(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value, each with the expression that gives it.

    Looks into tuples, lists, dictionaries and the attributes of other objects, and runs nothing of
    theirs: no property, no method of a subclass.
    """
    met: set[int] = set()
    waiting = [(name, value, 0)]
    while waiting and len(met) < _MOST:
        name, value, depth = waiting.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            yield name, value
            continue
        if id(value) in met or depth >= _DEEPEST:
            continue
        met.add(id(value))
        inner = list(parts_of_value(value))
        waiting += [(f"{name}{step}", one, depth + 1) for step, one in reversed(inner)]


def parts_of_value(value: Any) -> Iterator[tuple[str, object]]:
    """What a container or an object holds, each with the step that leads to it."""
    kind = type(value)
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", ())
        for at, one in enumerate(tuple.__iter__(value)):
            yield (f".{names[at]}" if at < len(names) else f"[{at}]"), one
    elif issubclass(kind, list):
        yield from ((f"[{at}]", one) for at, one in enumerate(list.__iter__(value)))
    elif issubclass(kind, dict):
        yield from ((f"[{_key(key)}]", one) for key, one in list(dict.items(value)))
    if issubclass(kind, (type, nn.Module)) or kind.__module__ in ("builtins", "types"):
        return
    held: Any = None
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        pass
    # A transformers output keeps each of its fields as an item and as an attribute.
    if type(held) is dict and not issubclass(kind, dict):
        yield from ((f".{key}", one) for key, one in list(held.items()))
    for base in kind.__mro__:
        for key, slot in vars(base).items():
            if isinstance(slot, MemberDescriptorType):
                try:
                    yield f".{key}", slot.__get__(value, kind)
                except AttributeError:
                    continue


def _key(key: object) -> str:
    return repr(key) if type(key) in (str, int, bool) else f"a {type(key).__name__}"
