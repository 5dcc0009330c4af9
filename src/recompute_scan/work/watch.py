"""Fills a ledger while two steps of a training run.

A dispatch mode sees each operator, module hooks see the calls around it, and a replaced function
sees autograd's engine begin. Each operator is called once, with the arguments that it would get
without the mode. No tensor is kept. Elements are read only to sum up the rows of a model's input
and memory that was there before. An exception of ours never reaches the script.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten

from recompute_scan.fidelity.operators import (
    OperatorKind,
    SeeingMode,
    kind_of,
    tensors,
)
from recompute_scan.fidelity.state import Drawn, weights
from recompute_scan.fidelity.tape import (
    function_modes,
    in_own_function,
    nodes_below,
    nodes_so_far,
)
from recompute_scan.fidelity.tensors import is_plain, unseen
from recompute_scan.frameworks.pytorch import RUN_BACKWARD
from recompute_scan.work.ledger import (
    BackwardPass,
    Frame,
    Frames,
    Ledger,
    Memory,
    ModuleCall,
    Operation,
    Phase,
)
from recompute_scan.work.value_numbers import Given, Values, storage_of

# Puts one function around another: what :meth:`recompute_scan.record.isolation.Guard.around` does.
Around = Callable[..., Callable[..., Any]]
# The name and the class of a module.
NameOf = Callable[[nn.Module], tuple[str, str]]
# Whether a frame's code belongs to an installed package; `None` for Python's and torch's.
InstalledAt = Callable[[FrameType], bool | None]
# How many frames are searched for a line outside of torch.
_DEEPEST = 80
# A step of more operators, as where a program evaluates within it, would take too much memory.
_MOST_OPERATORS = 200_000
# Less than this is not searched for who holds it.
_HELD_BYTES = 1 << 20
_MOST_COLLECTING_S = 2.0
# The function in which each module's call runs.
_MODULE_CALL = nn.Module._call_impl.__code__
# The file that calls operators for a mode.
_OPERATORS = torch._ops.__file__
# Parts of torch that work by themselves.
_CLOSED = tuple(
    os.path.join(Path(torch.__file__).parent, *part, "")  # noqa: PTH118 - with a separator at its end
    for part in (("optim",), ("distributed",), ("nn", "parallel"), ("amp",))
)
# The results of these are known to the program, or their sizes are.
_KNOWN_TO_HOST = ("aten._local_scalar_dense", "aten.equal")
# These write running statistics, their fourth and fifth arguments; their schemas do not say so.
_UPDATING = ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")
# These copy elements, of so many of their arguments' memories.
_COPYING = {"aten.cat": 1 << 10, "aten.stack": 1 << 10} | dict.fromkeys(
    ("aten.index", "aten.index_select", "aten.clone", "aten._to_copy", "aten.repeat"), 1
)
# About 0.2 ms, longer than the host takes from the beginning of a call to its launch.
_AHEAD_CYCLES = 400_000
# By these methods a program reads elements without an operator.
_READING = ("numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "untyped_storage")


@functools.lru_cache(maxsize=4096)
def _is_closed(file: str) -> bool:
    return file.startswith(_CLOSED)


def _module_call(frame: FrameType | None) -> FrameType | None:
    """The nearest frame outward that is the call of a module."""
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return frame


class StepWatch:
    """Watches two steps.

    Attributes:
        ledger: What was seen.
        untold: Why nothing could be seen; ``None`` where it could.

    Its ``patches`` are :class:`recompute_scan.record.isolation.Patches`.
    """

    def __init__(
        self,
        ledger: Ledger,
        name_of: NameOf,
        installed_at: InstalledAt,
        around: Around,
        is_scripts: Callable[[BaseException], bool],
        patches: Any,
        *,
        cuda: bool,
    ) -> None:
        self.ledger = ledger
        self.untold: str | None = None
        self._name_of = name_of
        self._installed_at = installed_at
        self._put_around = around
        self._is_scripts = is_scripts
        self._patches = patches
        self._mode = _Mode(self)
        self._handles: list[Any] = []
        self._values = Values(ledger)
        self._thread = threading.get_ident()
        self._first: dict[int, int] = {}
        self._kinds: dict[int, tuple[Any, OperatorKind, bool]] = {}
        self._stacks: dict[int, list[int]] = {}
        # The identity of the frame of each module call that goes on.
        self._frame_of: dict[int | None, int] = {}
        self._frames: dict[Frames, Frames] = {}
        self._keeps_graph = False
        self._timed: list[tuple[Operation, Any, Any]] = []
        self._cuda = cuda
        self._installed = False
        self.on = False
        # Whether autograd was on where what is noted now was called.
        self.grad_mode = True

    # The steps

    def begin(self) -> bool:
        """The first step begins; ``False`` where this version of torch cannot be watched."""
        if torch._C._len_torch_dispatch_stack():
            self.untold = "The script runs its steps under a TorchDispatchMode."
        elif not hasattr(torch.autograd, RUN_BACKWARD):
            self.untold = f"torch {torch.__version__} does not show when a backward pass begins."
        elif not _ends_are_seen():
            self.untold = f"torch {torch.__version__} does not show when memory is given back."
        if self.untold is not None:
            return False
        module = nn.modules.module
        before = self._around(_nothing, lambda call, *args: self._enter(*args))
        after = self._around(_nothing, lambda call, *args: self._leave(*args))
        self._handles = [
            module.register_module_forward_pre_hook(before),
            module.register_module_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        for owner in (torch.autograd, torch.autograd.graph):
            original = getattr(owner, RUN_BACKWARD)
            around = self._around(original, self._differentiate)
            self._patches.replace(owner, RUN_BACKWARD, around)
        for name in _READING:
            if (original := getattr(torch.Tensor, name, None)) is not None:
                around = self._around(original, self._read_from_outside)
                method = _Method(around)
                functools.update_wrapper(method, original)
                method.original = original
                self._patches.replace(torch.Tensor, name, method)
        self.on = self._installed = True
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return True

    def next_step(self) -> bool:
        """A step has ended; ``True`` when it was the second one."""
        if len(self.ledger.steps) > 1:
            return True
        self._values.drain()
        self.ledger.steps.append(len(self.ledger.operations))
        self._values.numbers.clear()
        self._first.clear()
        return False

    def end(self) -> None:
        """The second step has ended, or the script has: nothing is watched any more."""
        if not self._installed:
            return
        self.on = self._installed = False
        above = []
        while torch._C._len_torch_dispatch_stack():
            mode = _pop_mode()
            if mode is self._mode:
                _push_mode(mode)
                self._mode.__exit__(None, None, None)
                break
            above.append(mode)
        for mode in reversed(above):  # modes that the program has begun since
            _push_mode(mode)
        for handle in self._handles:
            handle.remove()
        self._patches.undo()
        # Memory that only reference cycles keep ends here: nothing can read it. Of a chain of
        # autograd functions in cycles each collection ends one, as far as the time allows.
        alive, until = -1, perf_counter() + _MOST_COLLECTING_S
        while alive != (now := len(self._values.alive())) and perf_counter() < until:
            alive = now
            gc.collect()
        self._values.end()
        if self._timed:
            torch.cuda.synchronize()
            for operation, begun, done in self._timed:
                operation.ms = begun.elapsed_time(done)

    def fail(self, error: Exception) -> None:
        """Looking has failed: what was seen is worth nothing.

        Raises:
            Exception: The program has raised it, in a signal handler.
        """
        if self._is_scripts(error):
            raise error
        self.untold = f"A step could not be watched ({type(error).__name__}: {error})."
        self.on = False

    def _around(self, original: Callable[..., Any], ours: Callable[..., Any]) -> Any:
        named = original is not _nothing
        return self._put_around(original, ours, named=named, ends=self.fail)

    # Operators

    def kind_of(self, func: Any) -> OperatorKind | None:
        """The kind of an operator; ``None`` of a view, which computes nothing.

        In inference mode what may be a view or a copy, such as `to`, is not taken apart by torch.
        """
        found = self._kinds.get(id(func))
        if found is None:
            kind = kind_of(func)
            seen = kind.computes or kind.writes or kind.leaves_open or kind.communicates
            # An operator hashes slowly; it is kept, so that nothing else gets its identity.
            found = self._kinds[id(func)] = func, kind, seen
        return found[1] if found[2] or torch.is_inference_mode_enabled() else None

    def before(
        self, kind: OperatorKind, args: tuple[Any, ...], named: dict[str, Any], caller: Any
    ) -> Given:
        """The input of a call, as it is now."""
        self._values.drain()
        if len(self.ledger.operations) > _MOST_OPERATORS:
            raise OverflowError(f"a step has more than {_MOST_OPERATORS:,} operators")
        phase = self._phase(caller)
        # Only what the forward of the first step repeats is looked for, and what is computed from
        # gradients that are to be differentiated.
        numbered = len(self.ledger.steps) == 1 and (phase == "forward" or self._keeps_graph)
        given = Given(kind, phase, [id(kind)] if numbered else None)
        self._values.take(args, given)
        if named:
            self._values.take(named.values(), given)
            if numbered:
                given.key = [*(given.key or ()), *named]
        given.written = self._written(given, args, named)
        if kind.may_draw and not kind.foreign:
            given.drawn = Drawn(given.tensors, named)
        given.begun = self._begun() if self._cuda else None
        return given

    def _written(self, given: Given, args: tuple[Any, ...], named: dict[str, Any]) -> list[Memory]:
        """The memory that a call writes, so far as it is there before."""
        kind = given.kind
        written: list[torch.Tensor] = []
        if kind.communicates:  # their schemas do not say what they write
            written = given.tensors
        elif kind.name in _UPDATING:
            written = tensors(args[3:5])
        elif kind.writes:
            written = tensors([args[place] for place in kind.written if place < len(args)])
            written += tensors((named["out"],)) if "out" in named else []
        return [one for tensor in written for one in given.of_tensor.get(id(tensor), ())]

    def _begun(self) -> Any:
        """The moment at which a GPU begins the call; ``None`` where the call is captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if not self._timed or self._timed[-1][2].query():  # the GPU waits: let the host get ahead
            torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        return _moment()

    def note(self, given: Given, result: Any, took_s: float, caller: Any) -> None:
        """A call has returned."""
        kind, ledger, values = given.kind, self.ledger, self._values
        values.drain()  # what the collector has ended: new memory may lie where it lay
        results = [result] if isinstance(result, torch.Tensor) else tensors((result,))
        new, others = [], False
        for one in results:
            memory, storage = values.known(one)
            others = others or memory is None or memory not in given.memories
            if memory is None and storage is not None:
                new.append((one, storage))
        if results and not (others or given.written or kind.leaves_open):
            return  # a view that its schema does not say to be one
        place = len(ledger.operations)
        stack = self._stacks.get(threading.get_ident())
        operation = Operation(
            kind.name, len(ledger.steps) - 1, given.phase, stack[-1] if stack else None
        )
        operation.ms = took_s * 1000
        if given.settings:
            operation.settings = hash((*given.settings,))
        if given.begun is not None:
            self._timed.append((operation, given.begun, _moment()))
        self._place(operation, given, caller)
        operation.draws = (
            kind.foreign
            or kind.communicates
            or (given.drawn is not None and given.drawn.outcome() is not None)
        )
        operation.needed = kind.communicates or kind.name in _KNOWN_TO_HOST
        operation.counts = (
            kind.computes and kind.derives and bool(given.memories) and not operation.needed
        )
        self._number(operation, given, place)
        self._read(operation, given, place)
        self._write(operation, given, place)
        if kind.name == "aten.convolution_backward":
            operation.gives_two = all(one is not None for one in result[:2])
        operation.makes = self._made(operation, given, new, place)
        ledger.operations.append(operation)

    def _number(self, operation: Operation, given: Given, place: int) -> None:
        """Give the operation its number, and find the operation that it repeats."""
        values = self._values
        if given.key is None:
            operation.number = values.fresh()
            return
        key = tuple(given.key)
        again = key in values.numbers and not given.written
        anew = operation.draws or (again and values.changed_outside(given.tensors))
        operation.number = values.fresh() if anew else values.number_of(key)
        if operation.counts and not given.written and not operation.draws:
            first = self._first.setdefault(operation.number, place)
            if first != place and given.phase == "forward":
                operation.repeats = first

    def _place(self, operation: Operation, given: Given, caller: Any) -> None:
        """Where in the program and in autograd's graph an operation runs."""
        if operation.phase != "forward":
            node = torch._C._current_autograd_node()
            operation.behind = node._sequence_nr() if node is not None else -1
            operation.in_function = isinstance(node, torch.autograd.function.BackwardCFunction)
        if operation.phase == "backward":
            return
        if operation.step == 0:
            operation.frames = self._called_from(caller, operation.call, operation.phase)
        if self.grad_mode:
            if any(one.requires_grad for one in given.tensors):
                operation.node = nodes_so_far() - 1
        elif operation.phase == "forward" and in_own_function():
            operation.in_function = True
            operation.node = nodes_so_far() - 1  # most often of that function

    def _called_from(self, frame: FrameType | None, call: int | None, phase: Phase) -> Frames:
        """The frames from this one to the module call around; equal ones are kept once.

        Of a recompute the innermost will do: the backward pass is around it, not the forward.
        """
        most = 1 if phase == "recompute" else _DEEPEST
        found = self._frames_from(frame, self._frame_of.get(call, 0), most)
        return self._frames.setdefault(found, found)

    def _frames_from(self, frame: FrameType | None, until: int, most: int) -> Frames:
        """The frames of packages and of the program, from this one out to the one of that identity,
        or to the script's or module's outermost.

        None for what torch does by itself, as in an optimizer: no line of the program changes it.
        """
        installed = self.ledger.installed
        found: list[Frame] = []
        name = ""
        while frame is not None and len(found) < most:
            code = frame.f_code
            file = code.co_filename
            if file not in installed:
                installed[file] = self._installed_at(frame)
            if installed[file] is not None:
                found.append(((file, frame.f_lineno), code.co_firstlineno))
                name = code.co_name
                if name == "<module>":
                    break
            elif code is _MODULE_CALL:
                if found and name != "forward":
                    found[-1] = found[-1][0], 0
                if id(frame) == until:
                    break
            elif not found and _is_closed(file):
                return ()
            frame = frame.f_back
        return tuple(found)

    def _read(self, operation: Operation, given: Given, place: int) -> None:
        kind = given.kind
        if not kind.derives:
            return
        reads = given.memories
        if kind.overwrites:
            size = sum(one.numel() * one.element_size() for one in given.tensors[:1])
            reads = [one for one in reads if one not in given.written or one.bytes > size]
        for memory in reads:
            memory.last_read = place
            if memory.unwritten and not (kind.writes or kind.communicates):
                self.ledger.hidden = (
                    f"{kind.name} reads memory that no operator has written: a kernel outside of "
                    "torch's dispatcher is at work."
                )
            if operation.phase != "forward":
                memory.read_in_backward = True
        operation.reads = tuple(reads)

    def _write(self, operation: Operation, given: Given, place: int) -> None:
        if not given.written:
            return
        for index, memory in enumerate(given.written):
            self._hold_result(memory, operation, given, ("writes", index))
            memory.expected += 1
            memory.checksum = None
            memory.writers.append(place)
            memory.unwritten = False
            memory.arriving = given.kind.communicates
        operation.writes = tuple(given.written)

    def _hold_result(
        self, memory: Memory, operation: Operation, given: Given, result: tuple[str, int]
    ) -> None:
        """Give memory the number of the result that an operation leaves in it."""
        values = self._values
        numbered = given.key is not None
        memory.number = (
            values.number_of((operation.number, *result)) if numbered else values.fresh()
        )
        memory.sources = (memory.number,)

    def _made(
        self,
        operation: Operation,
        given: Given,
        new: Sequence[tuple[torch.Tensor, Any]],
        place: int,
    ) -> tuple[Memory, ...]:
        """The memory that a call has made, of its results with their storages."""
        kind, made, values = given.kind, list[Memory](), self._values
        for index, (tensor, storage) in enumerate(new):
            if made and values.known(tensor)[0] is not None:
                continue  # two results in one storage
            memory = values.first_seen(storage, given.phase, made=True)
            if is_plain(tensor) and not tensor.is_inference():
                memory.expected = tensor._version
            if not (kind.leaves_open or operation.draws):
                self._hold_result(memory, operation, given, ("makes", index))
            if given.memories and (copied := _COPYING.get(kind.name)):
                memory.sources = tuple(
                    number for one in given.memories[:copied] for number in one.sources
                )
            memory.frames, memory.call = operation.frames, operation.call
            memory.unwritten = kind.leaves_open
            if not kind.leaves_open:
                memory.writers.append(place)
            made.append(memory)
        return tuple(made)

    # Around operators

    def _phase(self, caller: FrameType | None) -> Phase:
        """Where the program is: in a backward pass a module that is called runs again, and so does
        what runs with autograd on, unless the pass itself is to be differentiated.
        """
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        if self._stacks.get(threading.get_ident()):
            return "recompute"
        if self._keeps_graph:
            return "backward"
        if self.grad_mode:
            return "recompute"
        # Most often the engine calls, and there is no function around.
        engine = caller is None or caller.f_code.co_name == RUN_BACKWARD
        return "backward" if engine or not in_own_function() else "recompute"

    def _enter(self, module: nn.Module, _: Any) -> None:
        calls, thread = self.ledger.calls, threading.get_ident()
        # Operators of another thread are seen in a backward pass only.
        if not self.on or (thread != self._thread and self._phase(None) == "forward"):
            return
        self.grad_mode = torch.is_grad_enabled()
        stack = self._stacks.setdefault(thread, [])
        caller = sys._getframe(1)
        around, phase = stack[-1] if stack else None, self._phase(caller)
        name, class_name = self._name_of(module)
        place, first = len(self.ledger.operations), len(self.ledger.steps) == 1
        own = _module_call(caller) if first else None  # lines are of the first step
        call = ModuleCall(
            id(module),
            name,
            class_name,
            around,
            phase,
            self._called_from((own or caller).f_back, around, phase) if first else (),
            place,
            place,
        )
        self._frame_of[len(calls)] = id(own)
        stack.append(len(calls))
        calls.append(call)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if self.on:
            unseen(self._left, module, args, *rest)

    def _left(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        named = rest[0] if len(rest) > 1 else {}  # of a call that has failed there are no others
        stack = self._stacks.get(threading.get_ident(), [])
        while stack:
            index = stack.pop()
            self._frame_of.pop(index, None)
            call = self.ledger.calls[index]
            call.last = len(self.ledger.operations)
            if call.module == id(module):
                results = tensors(rest[-1:])
                call.trained = any(one.requires_grad for one in results)
                if call.call is None and call.phase == "forward" and len(self.ledger.steps) == 1:
                    self._values.see_rows(call, tree_flatten((args, named))[0], weights(module))
                return

    def _differentiate(self, call: Any, roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.on:
            return call(roots, *args, **kwargs)
        nested = torch._C._current_graph_task_id() != -1
        place = len(self.ledger.operations)
        here = BackwardPass(place, place, unseen(nodes_below, roots), nested)
        self.ledger.passes.append(here)
        keeps_graph, self._keeps_graph = self._keeps_graph, bool(args[2:3] and args[2])
        stacks, self._stacks = self._stacks, {}
        try:
            return call(roots, *args, **kwargs)
        finally:
            self._keeps_graph, self._stacks = keeps_graph, stacks
            here.last = len(self.ledger.operations)
            if not nested:
                unseen(self._see_holders, here)

    def _see_holders(self, here: BackwardPass) -> None:
        """Which autograd functions keep recomputed memory behind the pass that recomputed it."""
        alive = {
            key: memory
            for key, memory in self._values.alive()
            if memory.made_in == "recompute" and memory.born >= here.first
        }
        if sum(one.bytes for one in alive.values()) < _HELD_BYTES:
            return
        for one in gc.get_objects():
            # By type: to ask some objects for their class warns.
            if issubclass(type(one), torch.autograd.function.BackwardCFunction):
                for name, value in list(vars(one).items()):
                    if type(value) is torch.Tensor:
                        memory = alive.get(storage_of(value)._cdata)
                        if memory is not None:
                            self._hold(one, name, memory)

    def _hold(self, context: Any, name: str, memory: Memory) -> None:
        function = getattr(type(context), "_forward_cls", type(context))
        code = getattr(getattr(function, "forward", None), "__code__", None)
        line = (code.co_filename, code.co_firstlineno) if code is not None else None
        key = f"{function.__name__}'s ctx.{name}", line
        self.ledger.holders[key] = self.ledger.holders.get(key, 0) + memory.bytes

    def _read_from_outside(self, call: Any, tensor: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if self.on and type(tensor) is torch.Tensor:
            unseen(self._note_reading, tensor)
        return call(tensor, *args, **kw)

    def _note_reading(self, tensor: torch.Tensor) -> None:
        self._values.drain()  # it may lie where another has ended
        memory, _ = self._values.known(tensor)
        if memory is not None:
            memory.read_from_outside = True
            memory.last_read = len(self.ledger.operations)


class _Method(functools.partial[Any]):
    """A method of tensors in another's place, and equal to it: a program may look it up."""

    original: Any

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return self if tensor is None else functools.partial(self, tensor)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self.original)

    def __hash__(self) -> int:
        return hash(self.original)


class _Mode(SeeingMode):
    """Sees each operator of the thread that entered it, and of the backward passes it begins."""

    def __init__(self, watch: StepWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        watch = self._watch
        kind = watch.kind_of(func) if watch.on else None
        if kind is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        named = kwargs or {}
        call = unseen if types or function_modes() else _call
        grad_mode = watch.grad_mode = torch.is_grad_enabled()
        given, caller = None, sys._getframe().f_back
        try:
            given = call(watch.before, kind, args, named, caller)
        except Exception as error:
            watch.fail(error)
        begun = perf_counter()
        try:
            result = func(*args, **named)
        except BaseException as error:
            _hide_this_call(error)
            raise
        took = perf_counter() - begun
        if given is not None and watch.on:
            watch.grad_mode = grad_mode
            try:
                call(watch.note, given, result, took, caller)
            except Exception as error:
                watch.fail(error)
        return result


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _hide_this_call(error: BaseException) -> None:
    """Take the mode and its call of the operator off a traceback, to be followed by ``raise``.

    A ``raise`` without an exception adds no frame.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _OPERATORS):
        trace = trace.tb_next
    BaseException.with_traceback(error, trace)  # a class of the program's may refuse attributes


def _moment() -> Any:
    """A moment of the current stream, which the GPU notes when it comes to it."""
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _nothing(*_: Any) -> None:
    return None


def _ends_are_seen() -> bool:
    """Does a weak reference to a storage live as long as the storage?"""
    ended: list[Any] = []
    tensor = torch.empty(1)
    reference = weakref.ref(storage_of(tensor), ended.append)
    view = tensor.view(1, 1)
    del tensor
    lived = reference() is not None and not ended
    del view
    return lived and len(ended) == 1
