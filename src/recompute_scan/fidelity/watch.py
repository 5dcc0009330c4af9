"""Sees the operators of regions: a dispatch mode that is on while one of them runs.

It calls each operator once, as it would be called, and looks at what went in and came out. What
fails in looking ends the comparison of that region and nothing else.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from msgspec import Struct
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recompute_scan.faithful import Operation
from recompute_scan.fidelity.elements import is_plain
from recompute_scan.fidelity.fingerprint import Fingerprint, Keeping, Prints, fingerprint, unseen
from recompute_scan.fidelity.kept_between import Drawn
from recompute_scan.fidelity.operators import (
    OperatorKind,
    arguments,
    kind_of,
    results,
    storage_of,
    tensors,
)
from recompute_scan.fidelity.tape import Given, OperatorCall, Tape, TapeEntry

# The number that the next autograd node of this thread will have.
nodes_so_far: Callable[[], int] = torch._C._autograd._get_sequence_nr
# How many modes are on. Where a torch has no such function, as if others of the script's were.
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_mode_at: Callable[[int], object] = getattr(torch._C, "_get_dispatch_stack_at", lambda _: None)
# From torch 2.14 on it is no Python code.
_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)
_T = TypeVar("_T")
NameOf = Callable[[nn.Module], tuple[str, str]]


class WatchedRun(Keeping, Protocol):
    """A run of a region under way: its tape, whether autograd was on when it began, and who wants
    to know of each call.
    """

    tape: Tape
    grad_mode: bool

    def made(
        self,
        entry: TapeEntry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """A call has been noted on the tape."""

    def failed(self, error: Exception) -> None:
        """Something of ours has failed; nothing more is asked of this run."""


class WatchedStep:
    """Whether the step that is compared is under way still, in all threads."""

    def __init__(self) -> None:
        self.under_way = True


class Thread(threading.local):
    """The runs under way in one thread, the outermost first, and whether an operator is."""

    def __init__(self, step: WatchedStep) -> None:
        self.step = step
        self.runs: list[WatchedRun] = []
        self.inside = False
        self.handed: Any = None
        self.leaving: Any = None


class _Arguments(Struct, frozen=True, gc=False):
    """What was seen of what a call gets.

    Attributes:
        tensors: Its tensors.
        given: The same, as each tape knows them.
        numbers: What of it is no tensor.
        prints: Fingerprints of what it still gets as it was, and of what it gives.
        drawn: Sees whether it draws random numbers, where it may.
    """

    tensors: list[torch.Tensor]
    given: list[Given]
    numbers: tuple[object, ...]
    prints: Prints
    drawn: Drawn | None


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each call; entered with a run, unless :func:`watched_already`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code is compiled as without this mode. Else a function that is compiled for the first
        time while it is on would stay uncompiled from then on.
        """
        return True

    def __init__(self, thread: Thread, name_of: NameOf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._here = thread
        self._name_of = name_of

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
        # Below a dispatch mode autograd is off; without subclasses and other modes nobody looks.
        alone = not types and not _modes() and not function_modes()
        try:
            grad_mode, node = torch.is_grad_enabled(), nodes_so_far() - 1
            before = None
            if kind.changes:
                try:
                    before = unseen(self._look, kind, args, named)
                except Exception as error:
                    self._fail(error)
            result = func(*args, **named)
            try:
                if alone:
                    self._note(func, kind, before, args, named, result, grad_mode, node)
                else:
                    unseen(self._note, func, kind, before, args, named, result, grad_mode, node)
            except Exception as error:
                self._fail(error)
        finally:
            here.inside = False
        return result

    def _look(self, kind: OperatorKind, args: tuple[Any, ...], named: dict[str, Any]) -> _Arguments:
        """At what a call gets: before it where it may change that, else behind it."""
        runs = self._here.runs
        given, numbers = arguments(args, named)
        prints = Prints(runs)
        lying = [(one, storage_of(one)) for one in given]
        known = [run.tape.look(lying, prints if kind.computes else None) for run in runs]
        if kind.writes:  # its arguments will not be what they are
            prints.let_go()
            prints = Prints(runs)
        drawn = Drawn(given, named) if kind.may_draw else None
        return _Arguments(given, known, numbers, prints, drawn)

    def _note(
        self,
        func: Any,
        kind: OperatorKind,
        before: _Arguments | None,
        args: tuple[Any, ...],
        named: dict[str, Any],
        result: Any,
        grad_mode: bool,
        node: int,
    ) -> None:
        """A call that has returned, on the tape of each run."""
        if before is None:
            if kind.changes:  # to look at it has failed
                return
            before = self._look(kind, args, named)

        def where() -> Operation:
            return called_at(kind.name, self._name_of)

        def repeat() -> Fingerprint | None:
            return _repeat(func, kind, args, named)

        runs, prints = self._here.runs, before.prints
        # Where a run began without autograd, nothing in it is differentiated.
        if not grad_mode and True in [run.grad_mode for run in runs]:
            grad_mode = in_own_function()
        drawing = before.drawn.outcome() if before.drawn is not None else None
        computed, others = results(kind, result, args)
        call = OperatorCall(
            kind,
            before.numbers,
            [(one, storage_of(one)) for one in tensors((result,))],
            computed,
            others,
            drawing,
            grad_mode and kind.derives and True in [one.requires_grad for one in before.tensors],
            node,
        )
        try:
            for run, given in zip(runs, before.given, strict=True):
                entry = run.tape.add(call, given, prints)
                if entry is not None:
                    run.made(entry, where, repeat)
        finally:
            prints.let_go()

    def _fail(self, error: Exception) -> None:
        """No run that is under way is compared any further."""
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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) == "recompute_scan":
        frame = frame.f_back
    while frame is not None and _package(frame) != "recompute_scan":
        own = frame.f_locals.get("self")
        at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if isinstance(own, nn.Module):
            module, torchs = module or own, torchs or at
        if not site and _package(frame) not in ("torch", "contextlib"):
            site = at
        frame = frame.f_back
    name, kind_name = name_of(module) if module is not None else ("", "")
    return Operation(operator, name, kind_name, site or torchs)


def in_own_function() -> bool:
    """Is this the forward of an autograd function, inside the region?

    Autograd is off there, and runs through what it computes nevertheless.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) == "recompute_scan":
        frame = frame.f_back
    while frame is not None and _package(frame) != "recompute_scan":
        if frame.f_code is _APPLY or (_APPLY is None and _has_context(frame)):
            return True
        frame = frame.f_back
    return False


def _has_context(frame: FrameType) -> bool:
    """Is it a ``forward`` that gets an autograd function's context?"""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), torch.autograd.function.FunctionCtx)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _repeat(
    func: Any, kind: OperatorKind, args: tuple[Any, ...], named: dict[str, Any]
) -> Fingerprint | None:
    # An operator of a library may do more than compute; a subclass has no memory for a kernel.
    plain = all(is_plain(one) for one in tensors((*args, *named.values())))
    if kind.writes or kind.may_draw or kind.foreign or not plain:
        return None
    again, _ = results(kind, func(*args, **named), args)
    return fingerprint(again[0]) if again else None
