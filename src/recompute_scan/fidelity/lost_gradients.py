"""What leaves a reentrant checkpoint without the gradient that it would have, and is used.

A reentrant checkpoint runs its block with autograd off, and gives a gradient to what its autograd
function returns: tensors, side by side, and only where one of its inputs needs a gradient. A tensor
that leaves in any other way (inside a tuple, a dictionary or an object, as an attribute, or from
inputs none of which needs one) has none. Nothing is lost by that unless a loss depends on
it. So tensors that autograd would have followed are followed here, from the block to the loss, as
autograd does: through operators, not through ``detach`` or where gradients are switched off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct, field
from torch.utils._python_dispatch import TorchDispatchMode

from recompute_scan.fidelity.operators import kind_of, tensors, tensors_in
from recompute_scan.fidelity.tape import NameOf, called_at, in_own_function
from recompute_scan.result.fidelity import LostGradient, Operation

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
        alone: Whether none of its inputs needs a gradient.
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


# The block that made a tensor, and the leaks that it depends on.
_Depends = tuple[Applied | None, frozenset[_Leak]]


class Leaving:
    """Follows what leaves, in one thread of the step that is compared."""

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
        self._marks: dict[int, _Marks] = {}
        self._applied: list[Applied] = []
        self._mode: _Following | None = None
        self.switched_off = 0
        self.all: list[Applied] = []

    @property
    def innermost(self) -> Applied | None:
        """The call that is under way."""
        return self._applied[-1] if self._applied else None

    @contextmanager
    def applying(self, given: Sequence[object]) -> Iterator[None]:
        """Around a call of the autograd function with these arguments."""
        if not torch.is_grad_enabled():  # what is computed here has no gradient anyway
            yield
            return
        inputs = [one for one in given if isinstance(one, torch.Tensor)]
        applied = Applied(alone=not any(one.requires_grad for one in inputs))
        self._begin()
        self._applied.append(applied)
        self.all.append(applied)

        try:
            yield
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
            mode.leaving = None  # another thread's modes cannot be reached from here
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

    def follow(self, name: str, given: Sequence[torch.Tensor]) -> _Depends | None:
        """What the results of an operator that is called with these depend on."""
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
        return inside, frozenset(leaks)

    def _differentiates(self, inside: Applied | None) -> bool:
        if inside is None:
            return torch.is_grad_enabled() or in_own_function()
        return inside.level in (None, self.switched_off) or in_own_function()

    def note(self, depends: _Depends | None, made: Sequence[torch.Tensor]) -> None:
        """Note it of the results."""
        for one in made:
            if depends is not None and (one.is_floating_point() or one.is_complex()):
                self._marks[id(one)] = _Marks(weakref.ref(one), *depends)
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
        self.leaving: Leaving | None = leaving

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        leaving, depends = self.leaving, None
        kind = kind_of(func)
        if leaving is not None:
            try:
                if kind.derives and "detach" not in kind.name:
                    depends = leaving.follow(kind.name, tensors((*args, *named.values())))
            except Exception:
                leaving = self.leaving = None  # nothing more is followed, and nothing said
        result = func(*args, **named)
        if leaving is not None:
            try:
                leaving.note(depends, tensors((result,)))
            except Exception:
                self.leaving = None
        return result
