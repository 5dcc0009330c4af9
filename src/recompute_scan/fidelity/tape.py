"""The operators of a region's run as a tape, without their tensors.

A dispatch mode is on while a region runs. It calls each operator once, as it would be called, and
looks at its arguments and results. A failure in looking ends the comparison of that region and
nothing else.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import torch
from msgspec import Struct, field
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from recompute_scan.crash import is_from_handler
from recompute_scan.fidelity.operators import (
    OperatorKind,
    SeeingMode,
    arguments,
    kind_of,
    results,
    storage_of,
    tensors,
)
from recompute_scan.fidelity.state import Drawn, RandomDraw
from recompute_scan.fidelity.tensors import (
    TOGETHER,
    Fingerprint,
    fingerprint,
    fingerprint_as_it_lies,
    is_plain,
    order_in_memory,
    unseen,
)
from recompute_scan.result.fidelity import Operation


def part_of_memory(tensor: torch.Tensor) -> object:
    """Which part of its memory a tensor is, as which type; ``None`` where that is unknown.

    Another shape of the same elements in the same order has the same key.
    """
    order = order_in_memory(tensor)
    if order:
        return tensor.dtype, tensor.storage_offset(), tensor.shape, order
    if order is not None and tensor.numel() <= TOGETHER:
        return tensor.dtype, tensor.storage_offset(), tensor.numel()
    if not is_plain(tensor) or tensor.layout != torch.strided:
        return None
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), bits


class Prints:
    """Fingerprints that are taken around one call, each once for all tapes.

    Their tensors are held until the call has been noted, so that how far they are from the
    forward's is worked out only where they are not the same.

    Args:
        runs: The runs under way; if a later run is compared with one, distances are kept.
    """

    def __init__(self, runs: Sequence[RegionRun]) -> None:
        self._keep = True in [run.keeps for run in runs]
        self._made: dict[int, Fingerprint | None] = {}

    def of(self, tensor: torch.Tensor, known: Fingerprint | None = None) -> Fingerprint | None:
        """The fingerprint of a tensor, which stays as it is until :meth:`let_go`; ``known`` where a
        tape has it.
        """
        key = id(tensor)
        if key not in self._made:
            self._made[key] = (
                known.held(tensor) if known is not None else fingerprint_as_it_lies(tensor)
            )
        return self._made[key]

    def let_go(self) -> None:
        """The call has been noted."""
        made = [print_ for print_ in self._made.values() if print_ is not None]
        try:
            for print_ in made:
                print_.let_go(keep=self._keep)
        except Exception:  # one that no kernel sums up
            for print_ in made:
                print_.let_go(keep=False)
            raise


class Outside(Struct, frozen=True, gc=False):
    """A tensor that an operator got and that no operator of the run has made.

    Attributes:
        place: Which of the operator's tensors it is.
        print: Its fingerprint, when the run first used it.
        needs_gradient: Whether autograd would give it a gradient.
        tensor_id: The ``id`` of the tensor or of its base, by which a parameter is recognised.
    """

    place: int
    print: Fingerprint | None
    needs_gradient: bool
    tensor_id: int


class TapeEntry(Struct, frozen=True, gc=False):
    """One call of an operator that computes something, as :class:`OperatorCall` without tensors.

    Attributes:
        prints: Fingerprints of its results; ``None`` where they cannot be had.
        others: Fingerprints of its further results, which may hold what was in memory before.
        outside: What it got from outside the region.
        differentiable: Whether autograd goes through it.
        place: Number of the call on its tape.
        sources: Numbers of the calls that made or last wrote its arguments.
    """

    kind: OperatorKind
    prints: tuple[Fingerprint | None, ...]
    others: tuple[Fingerprint | None, ...]
    outside: tuple[Outside, ...]
    numbers: tuple[object, ...]
    drawing: RandomDraw | None
    differentiable: bool
    node: int
    place: int
    sources: frozenset[int]


class _Memory(Struct, eq=False, gc=False):
    """Memory that a run has seen.

    Attributes:
        made: Whether an operator of the run has made or written it.
        maker: The call that made or last wrote it, where that is on the tape.
        open: Whether part of it may be what it held before.
        prints: Of the tensors in it, by type and place, as long as nothing is written.
    """

    made: bool = False
    maker: int | None = None
    open: bool = False
    prints: dict[object, Fingerprint | None] = field(default_factory=dict)


# A tensor, and where it lies; ``None`` of one without memory.
InMemory = tuple[torch.Tensor, torch.UntypedStorage | None]


class Given(Struct, frozen=True, gc=False):
    """An operator's arguments, as one tape knows them: memory, tensors from outside, makers."""

    memories: Sequence[_Memory | None]
    outside: tuple[Outside, ...]
    sources: frozenset[int]


class OperatorCall(Struct, frozen=True, gc=False):
    """One call of an operator that has returned.

    Attributes:
        numbers: Its arguments that are no tensors.
        returned: The tensors that it returned.
        computed: Those that it has computed, to be compared.
        others: What else it has computed.
        drawing: Where it drew random numbers.
        differentiable: Whether an argument needs a gradient, with autograd on.
        node: Number of the autograd node that was made last before it: its own, if it has one.
    """

    kind: OperatorKind
    numbers: tuple[object, ...]
    returned: Sequence[InMemory]
    computed: Sequence[torch.Tensor]
    others: Sequence[torch.Tensor]
    drawing: RandomDraw | None
    differentiable: bool
    node: int


class Tape(Struct):
    """A run of a region under way, or what is left of it.

    Attributes:
        entries: Calls so far, in order.
    """

    entries: list[TapeEntry] = field(default_factory=list)
    _memory: dict[int, _Memory] = field(default_factory=dict)
    # They keep the numbers of storages from being given to others, and not what they hold.
    _weak: list[StorageWeakRef] = field(default_factory=list)

    def look(self, arguments: Sequence[InMemory], prints: Prints | None) -> Given:
        """The arguments of an operator that is about to be called; ``prints`` is ``None`` for one
        that computes nothing.
        """
        memories, outside, sources = [], [], set()
        for place, (tensor, storage) in enumerate(arguments):
            memory = self._memory_in(storage)
            memories.append(memory)
            if memory is None:
                continue
            if memory.maker is not None:
                sources.add(memory.maker)
            if prints is not None and not memory.made:
                base = tensor._base if tensor._is_view() else tensor
                print_ = _print_in(memory, tensor, prints)
                outside.append(Outside(place, print_, tensor.requires_grad, id(base)))
        return Given(memories, tuple(outside), frozenset(sources))

    def maker_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the call that made a tensor or wrote it last."""
        memory = self._memory_of(tensor)
        return memory.maker if memory is not None else None

    def print_of(self, tensor: torch.Tensor, prints: Prints) -> Fingerprint | None:
        """The fingerprint of a tensor as it is now; ``None`` where part of it may be anything."""
        memory = self._memory_of(tensor)
        return None if memory is None or memory.open else _print_in(memory, tensor, prints)

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether no operator of the run has made or written it."""
        memory = self._memory_of(tensor)
        return memory is not None and not memory.made

    def add(self, call: OperatorCall, given: Given, prints: Prints) -> TapeEntry | None:
        """Note a call that has returned. ``None`` of one that computes nothing to compare."""
        kind = call.kind
        memories = {id(one): self._memory_in(storage) for one, storage in call.returned}
        # Memory of the results that is not an argument's.
        made = [one for one in memories.values() if one is not None and one not in given.memories]
        if kind.leaves_open or not kind.computes:
            for one in made:
                one.made, one.maker, one.open = True, None, kind.leaves_open
                one.prints.clear()
            return None
        computed, others = call.computed, [*call.others]
        place = len(self.entries)
        written = []
        if kind.writes:
            all_written = [self._memory_of(one) for one in computed]
            written = [one for one in all_written if one is not None and one not in made]
            if False in [one.made for one in written]:
                # A buffer or an input of the region, which the region has made from here on.
                computed = []
        for one in (*made, *written):
            one.made, one.maker = True, place
            one.prints.clear()
        for one in (*made, *written) if kind.overwrites else made:
            one.open = False
        prints_of: list[Fingerprint | None] = []
        for result in computed:
            memory = memories[id(result)] if id(result) in memories else self._memory_of(result)
            if memory is None and result.numel():  # no memory that could be looked at
                prints_of.append(None)
            elif memory is not None and memory.open:
                others.append(result)
                prints_of.append(None)
            else:
                print_ = prints.of(result)
                prints_of.append(print_)
                if memory is not None and (key := part_of_memory(result)) is not None:
                    memory.prints[key] = print_
        real = any(one.is_floating_point() or one.is_complex() for one in computed)
        entry = TapeEntry(
            kind,
            tuple(prints_of),
            tuple([prints.of(one) for one in others if memories.get(id(one), one) is not None]),
            given.outside,
            call.numbers,
            call.drawing,
            call.differentiable and (not computed or real),
            call.node,
            place,
            given.sources,
        )
        self.entries.append(entry)
        return entry

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        return self._memory_in(storage_of(tensor))

    def _memory_in(self, storage: torch.UntypedStorage | None) -> _Memory | None:
        if storage is None:
            return None
        number = storage._cdata
        known = self._memory.get(number)
        if known is None:
            known = self._memory[number] = _Memory()
            self._weak.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return known


def _print_in(memory: _Memory, tensor: torch.Tensor, prints: Prints) -> Fingerprint | None:
    key = part_of_memory(tensor)
    if key is None:
        return prints.of(tensor)
    print_ = memory.prints[key] = prints.of(tensor, memory.prints.get(key))
    return print_


# The number that the next autograd node of this thread will have.
nodes_so_far: Callable[[], int] = torch._C._autograd._get_sequence_nr
# How many modes are on. Where a torch has no such function, as if others of the script's were.
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_mode_at: Callable[[int], object] = getattr(torch._C, "_get_dispatch_stack_at", lambda _: None)
# From torch 2.14 on it is no Python code.
_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)
_OURS = __file__.rpartition("fidelity")[0]
_T = TypeVar("_T")
NameOf = Callable[[nn.Module], tuple[str, str]]
# Makes a function of one of torch's and one of ours around it, which cannot fail for the script.
Around = Callable[..., Callable[..., Any]]


class RegionRun:
    """A run of a region: its tape, and how it sees the tensors that its nodes save.

    Attributes:
        keeps: Whether later runs are compared with it.
        grad_mode: Whether autograd was on when it began.
    """

    keeps = False

    def __init__(self, untold: Callable[[str], None]) -> None:
        self.tape = Tape()
        self.grad_mode = torch.is_grad_enabled()
        self._untold = untold

    def made(
        self,
        entry: TapeEntry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """A call has been noted on the tape.

        Args:
            entry: The call.
            where: Gives its place; called only for a call that differs from the forward's.
            repeat: Makes the call once more and gives the fingerprint of its first result;
                ``None`` where that cannot be done without changing anything.
        """

    def saved(self, tensor: torch.Tensor, place: int) -> None:
        """A node of this run saves a tensor."""
        try:
            prints = Prints((self,))
            unseen(self._see_saved, tensor, place, prints)
            unseen(prints.let_go)
        except Exception as error:
            self.failed(error)

    def _see_saved(self, tensor: torch.Tensor, place: int, prints: Prints) -> None:
        """Compare it, or keep its fingerprint for that."""

    def failed(self, error: Exception) -> None:
        """Stop comparing the region, because looking at it has failed.

        Raises:
            Exception: A signal handler of the script has raised it.
        """
        if is_from_handler(error):
            raise error
        self._untold(f"Its results could not be looked at ({type(error).__name__}).")


class ComparedStep(Struct, eq=False):
    """The step in which recomputes are compared, in all threads, and whether it goes on still."""

    name_of: NameOf
    around: Around
    under_way: bool = True


class Thread(threading.local):
    """The runs under way in one thread, the outermost first, and whether an operator is."""

    def __init__(self, step: ComparedStep) -> None:
        self.step = step
        self.runs: list[RegionRun] = []
        self.inside = False
        self.handed: Any = None
        self.leaving: Any = None


class _Call(Struct, frozen=True, gc=False):
    """A call of an operator, with autograd's state: on or off, and its last node's number."""

    func: Any
    kind: OperatorKind
    args: tuple[Any, ...]
    named: dict[str, Any]
    grad_mode: bool
    node: int

    def repeated(self) -> Fingerprint | None:
        """The fingerprint of its first result if it is made once more; ``None`` if it cannot be."""
        kind = self.kind
        # An operator of a library may do more than compute; a subclass has no memory for a kernel.
        plain = all(is_plain(one) for one in tensors((*self.args, *self.named.values())))
        if kind.writes or kind.may_draw or kind.foreign or not plain:
            return None
        again, _ = results(kind, self.func(*self.args, **self.named), self.args)
        return fingerprint(again[0]) if again else None


class _Arguments(Struct, frozen=True, gc=False):
    """The tensors and the numbers in a call.

    Attributes:
        given: The tensors, as each tape knows them.
        prints: Fingerprints of the unchanged arguments, and of the results.
        drawn: Sees whether the call draws random numbers, where it may.
    """

    tensors: list[torch.Tensor]
    given: list[Given]
    numbers: tuple[object, ...]
    prints: Prints
    drawn: Drawn | None


class Watch(SeeingMode):
    """Sees each call; entered with a run, unless :func:`watched_already`."""

    def __init__(self, thread: Thread) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._here = thread

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        here = self._here
        unwanted = here.inside or not here.step.under_way
        kind = None if unwanted else kind_of(func)
        # Seen already, by the mode of a run inside this one; or nothing that is compared.
        if kind is None or not (kind.computes or kind.leaves_open):
            return func(*args, **named)
        here.inside = True
        try:
            call = _Call(func, kind, args, named, torch.is_grad_enabled(), nodes_so_far() - 1)
            before = None
            try:
                if kind.changes:
                    before = unseen(self._look, call)
            except Exception as error:
                self._fail(error)
            result = func(*args, **named)
            try:
                unseen(self._note, call, before, result)
            except Exception as error:
                self._fail(error)
        finally:
            here.inside = False
        return result

    def _look(self, call: _Call) -> _Arguments:
        """The arguments of a call: before it where it may change them, else after it."""
        runs, kind = self._here.runs, call.kind
        given, numbers = arguments(call.args, call.named)
        prints = Prints(runs)
        lying = [(one, storage_of(one)) for one in given]
        known = [run.tape.look(lying, prints if kind.computes else None) for run in runs]
        if kind.writes:  # its arguments will change
            prints.let_go()
            prints = Prints(runs)
        drawn = Drawn(given, call.named) if kind.may_draw else None
        return _Arguments(given, known, numbers, prints, drawn)

    def _note(self, call: _Call, before: _Arguments | None, result: Any) -> None:
        """Note a call that has returned on the tape of each run."""
        kind, grad_mode = call.kind, call.grad_mode
        if before is None:
            if kind.changes:  # to look at it has failed
                return
            before = self._look(call)
        where = functools.partial(called_at, kind.name, self._here.step.name_of)
        runs, prints = self._here.runs, before.prints
        # Where a run began without autograd, nothing in it is differentiated.
        if not grad_mode and True in [run.grad_mode for run in runs]:
            grad_mode = in_own_function()
        drawing = before.drawn.outcome() if before.drawn is not None else None
        computed, others = results(kind, result, call.args)
        returned = OperatorCall(
            kind,
            before.numbers,
            [(one, storage_of(one)) for one in tensors((result,))],
            computed,
            others,
            drawing,
            grad_mode and kind.derives and True in [one.requires_grad for one in before.tensors],
            call.node,
        )
        try:
            for run, given in zip(runs, before.given, strict=True):
                entry = run.tape.add(returned, given, prints)
                if entry is not None:
                    run.made(entry, where, call.repeated)
        finally:
            prints.let_go()

    def _fail(self, error: Exception) -> None:
        """No run that is under way is compared any further.

        Raises:
            Exception: A signal handler of the script has raised it.
        """
        if is_from_handler(error):
            raise error
        for run in self._here.runs:
            run.failed(error)


def watched_already(thread: Thread) -> bool:
    """Whether a call would come to a :class:`Watch` of these runs before any other mode, which
    could hide it.
    """
    modes = _modes()
    first = _mode_at(modes - 1) if modes else None
    return isinstance(first, Watch) and first._here is thread


def called_at(operator: str, name_of: NameOf) -> Operation:
    """Where an operator is called now: as far out as the region's function."""
    module, site, torchs = None, "", ""
    for frame in _frames():
        own = frame.f_locals.get("self")
        at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if isinstance(own, nn.Module):
            module, torchs = module or own, torchs or at
        if not site and _package(frame) not in ("torch", "contextlib"):
            site = at
    name, kind_name = name_of(module) if module is not None else ("", "")
    return Operation(operator, name, kind_name, site or torchs)


def in_own_function() -> bool:
    """Is this the forward of an autograd function, inside the region?

    Autograd is off there, and runs through what it computes nevertheless.
    """
    return any(
        frame.f_code is _APPLY or (_APPLY is None and _has_context(frame)) for frame in _frames()
    )


def _frames() -> Iterator[FrameType]:
    """The region's frames, innermost first: those between ours that look and ours that run it."""
    frame: FrameType | None = sys._getframe(1)
    inside = False
    while frame is not None:
        ours = frame.f_code.co_filename.startswith(_OURS)
        if inside and ours:
            return
        inside = not ours
        if inside:
            yield frame
        frame = frame.f_back


def _has_context(frame: FrameType) -> bool:
    """Is it a ``forward`` that gets an autograd function's context?"""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), torch.autograd.function.FunctionCtx)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def nodes_below(roots: Any) -> frozenset[int]:
    """The numbers of all nodes that a pass from these roots may evaluate."""
    roots = roots if isinstance(roots, (list, tuple)) else [roots]
    waiting = [
        one.grad_fn if isinstance(one, torch.Tensor) else getattr(one, "node", None)
        for one in roots
    ]
    seen = set()
    numbers = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        with suppress(AttributeError, RuntimeError):
            numbers.add(node._sequence_nr())
        waiting += [below for below, _ in node.next_functions]
    return frozenset(numbers)
