"""The reads of a recompute by the backward pass, and the gradients that a region loses.

Only the tensors of a recompute that the backward pass uses can change a gradient.

A non-reentrant checkpoint keeps the forward's nodes, and gives them the tensors that the nodes of
the recompute save, one for one and in order. The backward pass asks for some of them. So a
difference counts where the n-th tensor saved differs from the forward's n-th, and is asked for.

A reentrant one runs backward through the recompute's own nodes. There a difference counts where a
node below an output that gets a gradient has saved what differs, or was itself called differently.

A region loses gradients at its outputs, and in an autograd function of the script.

A reentrant checkpoint runs its block with autograd off. It gives a gradient to the tensors that its
autograd function returns side by side, and only where one of its inputs needs a gradient. A tensor
that leaves inside a tuple, a dictionary or an object, or as an attribute, has no gradient. That
matters only if the training loss depends on the tensor. So tensors that autograd would have
followed are followed here, from the block to the loss, as autograd does: through operators, not
through ``detach`` or where gradients are switched off.

An autograd function of the script may return the results of the block that it runs, whole or in
parts. Then the gradient that it gets has to arrive at the recompute's results, it has to return the
gradient of the block's inputs, and the weights have to get theirs. Sums of elements are compared,
which do not depend on shapes and the number of parts.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from recompute_scan.crash import is_from_handler
from recompute_scan.fidelity.operators import SeeingMode, kind_of, tensors, tensors_in
from recompute_scan.fidelity.tape import Around, NameOf, RegionRun, called_at, in_own_function
from recompute_scan.fidelity.tensors import unseen
from recompute_scan.result.fidelity import LostGradient, Operation, WhyLost

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
# Returns its argument. A method of a dictionary: in a Python function something could go wrong.
AS_IT_IS: Callable[[torch.Tensor], Any] = functools.partial(dict[None, Any]().get, None)


class HandedTensors(Struct):
    """The tensors that one run of a non-reentrant checkpoint saves, in order.

    Attributes:
        run: The run that sees each of them.
        used: Numbers of the tensors that the backward pass has asked for.
    """

    run: RegionRun | None = None
    count: int = 0
    used: set[int] = field(default_factory=set)
    _places: dict[int, int] = field(default_factory=dict)

    def pack(self, call: Pack, tensor: torch.Tensor) -> Any:
        """Around the checkpoint's own hook, which may end the recompute by an exception."""
        place = self.count
        self.count += 1
        if self.run is not None:
            self.run.saved(tensor, place)
        packed = call(tensor)
        if not isinstance(packed, torch.Tensor):  # a forward's: what backward asks with
            self._places[id(packed)] = place  # each is noted, so an older one's is overwritten
        return packed

    def unpack(self, call: Unpack, packed: Any) -> torch.Tensor:
        """Around the checkpoint's other hook."""
        if not isinstance(packed, torch.Tensor) and id(packed) in self._places:
            self.used.add(self._places[id(packed)])
        return call(packed)


def hook_classes() -> Iterator[type[torch.autograd.graph.saved_tensors_hooks]]:
    """The classes of torch's non-reentrant checkpoint for the tensors that are saved, if any."""
    for name in ("_checkpoint_hook", "_recomputation_hook"):
        found = getattr(torch.utils.checkpoint, name, None)
        if isinstance(found, type) and issubclass(found, torch.autograd.graph.saved_tensors_hooks):
            yield found


def see_what_is_handed(
    hooks: torch.autograd.graph.saved_tensors_hooks, around: Around
) -> HandedTensors:
    """Note the tensors that pass both hooks, which are about to be put in place."""
    handed = HandedTensors()
    hooks.pack_hook = around(hooks.pack_hook, handed.pack, named=False)
    hooks.unpack_hook = around(hooks.unpack_hook, handed.unpack, named=False)
    return handed


class SavedGraph(Struct, frozen=True):
    """The recomputed nodes that the gradient of one output runs through: their numbers, the tensors
    that they have saved, and whether some of these could not be seen.
    """

    nodes: frozenset[int]
    saved: tuple[torch.Tensor, ...]
    unknown: bool


def graphs_below(outputs: Sequence[torch.Tensor], first: int) -> list[SavedGraph]:
    """The graph below each output, of nodes with this number or a later one."""
    seeing = _Seeing()
    try:
        return [_graph_below(output.grad_fn, first, seeing) for output in outputs]
    finally:
        seeing.forget()


def _graph_below(root: Any, first: int, seeing: _Seeing) -> SavedGraph:
    nodes: dict[Any, int] = {}
    saved: list[torch.Tensor] = []
    unknown = False
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes or (number := node._sequence_nr()) < first:
            continue
        nodes[node] = number
        found = seeing.saved_by(node)
        unknown = unknown or found is None
        saved += found or ()
        waiting += [following for following, _ in node.next_functions]
    return SavedGraph(frozenset(nodes.values()), tuple(saved), unknown)


class _Seeing:
    """Sees the tensors that nodes have saved, each node once."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []
        self._known: dict[Any, list[torch.Tensor] | None] = {}

    def saved_by(self, node: Any) -> list[torch.Tensor] | None:
        """The tensors that a node has saved; ``None`` where they cannot be seen."""
        if node not in self._known:
            self._known[node] = self._look(node)
        return self._known[node]

    def forget(self) -> None:
        """Hold no node and no tensor any more: a hook on a saved tensor holds this."""
        self._found = []
        self._known.clear()

    def _look(self, node: Any) -> list[torch.Tensor] | None:
        if node.name() == "CopySlices":  # around another node, which cannot be reached
            return None
        kind: Any = type(node)
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        self._found = found = tensors(tuple(vars(node).values())) if own else []
        for name in _slots(kind):
            held = getattr(node, name)
            for one in held if isinstance(held, (list, tuple)) else (held,):
                if hasattr(one, "unpack_hook"):
                    # Looked at only: behind hooks torch no longer sees it written in place.
                    if one.unpack_hook is not None:  # of the script's, or of a checkpoint
                        return None
                    if one.data is not None:
                        found.append(one.data)
                    continue
                try:  # an older torch's
                    one.register_hooks(self._pack, AS_IT_IS)
                except RuntimeError as error:
                    # Either nothing is saved, or hooks have it.
                    if "already been set" in str(error):
                        return None
        return found

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called at once, and never again."""
        self._found.append(tensor)
        return tensor


def arrives(output: torch.Tensor, around: Around) -> Callable[[], bool]:
    """Whether an output gets a gradient that is not zero; asked after the backward pass."""
    seen: list[bool] = []

    def see(call: Pack, gradient: torch.Tensor) -> Any:
        seen.append(bool(unseen(torch.any, gradient)))
        return call(gradient)

    output.register_hook(around(AS_IT_IS, see, named=False))  # type: ignore[no-untyped-call]
    return lambda: any(seen)


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


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
        alone: Whether it has no input that needs a gradient.
        report: Takes each lost gradient.
    """

    under_way: bool = True
    level: int | None = None
    weights: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    lost: dict[str, Operation] = field(default_factory=dict)
    alone: bool = False
    report: Callable[[LostGradient], None] | None = None


class _Leak(Struct, eq=False, frozen=True):
    """A tensor that left, by the name that it left under, and where it was used first."""

    applied: Applied
    name: str
    used: Operation


class _Marks(Struct, eq=False, frozen=True):
    """The block that made a tensor, and the leaks that the tensor depends on."""

    tensor: weakref.ref[torch.Tensor]
    made_in: Applied | None
    leaks: frozenset[_Leak]


# The block that made a tensor, and the leaks that it depends on.
_Depends = tuple[Applied | None, frozenset[_Leak]]


class Leaving:
    """Follows what leaves, in one thread of the step that is compared.

    Attributes:
        switched_off: How many ``no_grad`` are around what runs.
        all: The calls, in order.
        untold: Why what left is not known, a sentence.
    """

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
        self._marks: dict[int, _Marks] = {}
        self._applied: list[Applied] = []
        self._mode: _Following | None = None
        self.switched_off = 0
        self.all: list[Applied] = []
        self.untold: str | None = None

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
        with torch._C.DisableTorchFunction():  # no mode or subclass of the script's sees this look
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
        """Around the block that the function runs; takes the block's result."""
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
        """The block and the leaks on which an operator's results depend."""
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


class _Following(SeeingMode):
    """Sees each operator from the first reentrant checkpoint to the backward pass."""

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
            except Exception as error:
                self._end(error)
                leaving = None
        result = func(*args, **named)
        if leaving is not None:
            try:
                leaving.note(depends, tensors((result,)))
            except Exception as error:
                self._end(error)
        return result

    def _end(self, error: Exception) -> None:
        """Follow nothing more, and say why."""
        if is_from_handler(error):
            raise error
        if self.leaving is not None:
            self.leaving.untold = (
                f"Tensors that left its block could not be followed ({type(error).__name__})."
            )
        self.leaving = None


# How far apart sums of the same elements may be, as a share of the sum of their sizes: they may be
# rounded to bfloat16 on their way.
_ROUNDING = 0.01
_ACCUMULATES = "torch::autograd::AccumulateGrad"


class Application(Struct, eq=False):
    """One call of an autograd function, while its forward runs.

    Attributes:
        node: Its context, which is its node in the graph.
        returned: Functions that take its result.
    """

    node: Any
    args: tuple[object, ...]
    returned: list[Callable[[Any], None]] = field(default_factory=list)

    def ended(self, result: Any) -> Any:
        """Its forward has returned this; returns it."""
        for tell in self.returned:
            tell(result)
        return result


class _Sums(Struct):
    """The number of floating-point elements, their sum, and the sum of their sizes."""

    count: int = 0
    total: float = 0.0
    size: float = 0.0

    def add(self, value: object) -> None:
        for one in tensors((value,)):
            if one.is_floating_point() and not isinstance(one, nn.Parameter):
                self.count += one.numel()
                wide = one.detach().double()
                self.total += float(wide.sum())
                self.size += float(wide.abs().sum())

    def same(self, other: _Sums) -> bool:
        apart = max(abs(self.total - other.total), abs(self.size - other.size))
        return self.count == other.count and apart <= _ROUNDING * max(self.size, other.size)


class Passing:
    """Follows the gradients of one application.

    Attributes:
        under_way: Whether the function's backward runs.
    """

    def __init__(
        self, application: Application, around: Around, tell: Callable[[WhyLost], None]
    ) -> None:
        self._around = around
        self._tell = tell
        self._given, self._returned = _Sums(), _Sums()
        self._block_given, self._block_returned = _Sums(), _Sums()
        # By the number of the backward pass through what was recomputed.
        self._arrived: list[_Sums] = []
        self._left: list[_Sums] = []
        self._weights: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._got: set[int] = set()
        self._passed = self._over = False
        unseen(self._given.add, application.args)
        inputs = [one for one in tensors(application.args) if not isinstance(one, nn.Parameter)]
        self._asked = any(one.requires_grad for one in inputs)
        # Backward has a gradient for each of these; weights may be among them.
        direct = (one for one in application.args if isinstance(one, torch.Tensor))
        self._is_input = [not isinstance(one, nn.Parameter) for one in direct]
        application.returned.append(lambda result: unseen(self._returned.add, result))
        self.under_way = False
        node = application.node
        node.register_prehook(around(lambda *_: None, self._begins, named=False))
        node.register_hook(around(lambda *_: None, self._ended, named=False))

    def ran(self, given: object, result: object) -> None:
        """The block has run in the forward."""
        unseen(self._block_given.add, given)
        unseen(self._block_returned.add, result)

    def recomputed(self, given: object, first_node: int, result: object) -> None:
        """The block has run again; ``first_node`` is the number of its first node in the graph."""
        if self._over:  # another pass evaluates the node again
            self._arrived, self._left, self._over = [], [], False
        outputs = [one for one in tensors((result,)) if one.grad_fn is not None]
        for one in outputs:
            self._watch(self._arrived, one)
        if outputs:
            inputs = [one for one in tensors((given,)) if one.requires_grad]
            for one in inputs:
                if not isinstance(one, nn.Parameter):
                    self._watch(self._left, one)
            self._expect(outputs, first_node, {id(one) for one in inputs})

    def _watch(self, passes: list[_Sums], tensor: torch.Tensor) -> None:
        """Add the tensor's gradient to the sums of each backward pass."""
        met = itertools.count()

        def see(call: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> Any:
            number = next(met)
            if number == len(passes):
                passes.append(_Sums())
            unseen(passes[number].add, gradient)
            return call(gradient)

        tensor.register_hook(self._around(AS_IT_IS, see, named=False))  # type: ignore[no-untyped-call]

    def _expect(self, outputs: Sequence[torch.Tensor], first_node: int, inputs: set[int]) -> None:
        """Expect a gradient for each weight in the recomputed graph."""
        waiting: list[Any] = [one.grad_fn for one in outputs]
        met = set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in met:
                continue
            met.add(node)
            if node.name() == _ACCUMULATES:
                weight = node.variable
                if id(weight) not in inputs and id(weight) not in self._weights:
                    self._weights[id(weight)] = (weakref.ref(weight), self._noting(weight))
            elif node._sequence_nr() >= first_node:
                waiting += [following for following, _ in node.next_functions]

    def _noting(self, weight: torch.Tensor) -> Any:
        number = id(weight)

        def see(call: Callable[[torch.Tensor], Any], one: torch.Tensor) -> Any:
            self._got.add(number)
            return call(one)

        hook = self._around(lambda _: None, see, named=False)
        return weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _begins(self, call: Any, _: Sequence[Any]) -> Any:
        self.under_way = True
        return call()

    def _ended(self, call: Any, given: Sequence[Any], arrived: Sequence[Any]) -> Any:
        """The function's backward has run, with the gradients ``arrived`` and ``given``."""
        self.under_way = False
        found = unseen(self._compared, given, arrived)
        self._over = True
        if found is not None:
            self._tell(found)
        return call()

    def _compared(self, given: Sequence[Any], arrived: Sequence[Any]) -> WhyLost | None:
        plain = self._block_returned.same(self._returned) and self._block_returned.size > 0
        if not (plain and self._arrived):
            return None
        wanted, made = _Sums(), _Sums()
        wanted.add(arrived)
        self._passed = wanted.size > 0
        if wanted.count != self._returned.count:  # some of it is not differentiated
            return None
        if not any(one.same(wanted) for one in self._arrived):
            return "arrives-otherwise"
        made.add(tuple(itertools.compress(given, self._is_input)))
        if not (self._asked and self._left and self._block_given.same(self._given)):
            return None
        return None if any(one.same(made) for one in self._left) else "returned-otherwise"

    def without_gradient(self) -> list[int]:
        """The numbers of weights that got no gradient, after the outermost backward pass."""
        lacking = []
        for number, (weight, hook) in self._weights.items():
            hook.remove()
            one = weight()
            if self._passed and one is not None and one.grad is None and number not in self._got:
                lacking.append(number)
        self._weights.clear()
        return lacking
