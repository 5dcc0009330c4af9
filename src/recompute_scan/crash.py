"""How a run ended that did not end well, in words that record, diagnosis and result share."""

from __future__ import annotations

import inspect
import signal
import traceback
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal

from msgspec import Struct

Ending = Literal["raised", "exited", "hung", "killed", "ended"]


class Frame(Struct, frozen=True):
    """One Python frame: file, 1-based line (0 where unknown), function, and the line's text."""

    file: str
    line: int
    function: str
    source: str | None = None

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"

    @property
    def site(self) -> str:
        """``file:function`` with forward slashes, as patterns look for it."""
        return f"{self.file}:{self.function}".replace("\\", "/")


class Raised(Struct, frozen=True):
    """One exception.

    Attributes:
        type: Its class as a traceback names it, such as ``torch.utils.checkpoint.CheckpointError``.
        message: Its text, possibly of several lines.
        frames: Where it came from, outermost first; empty where that is not known.
    """

    type: str
    message: str
    frames: tuple[Frame, ...] = ()

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.type.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """``Type: first line of the message``, as the last line of a traceback has it."""
        first = self.message.strip().partition("\n")[0]
        return f"{self.type}: {first}" if first else self.type


class ModelState(Struct, frozen=True):
    """One model at the moment of the failure.

    Attributes:
        name: Class of the outermost module.
        parameters: Number of its parameters, as this rank holds them.
        trainable: How many of them need a gradient.
        training: Whether it is in training mode.
        parallel: Wrappers for parallel training found in it, such as ``3 x FSDP``.
        checkpoints: Activation checkpoints found in it, in words, one for each way.
        wrapped: Whether a checkpoint wrapper is around some module.
        switched: Whether a model's own checkpointing flag is on.
        use_cache: The model's setting for a key-value cache; ``None`` where it has none.
    """

    name: str
    parameters: int
    trainable: int
    training: bool
    parallel: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    wrapped: bool = False
    switched: bool = False
    use_cache: bool | None = None


class RankEnd(Struct, frozen=True):
    """How one rank ended.

    Attributes:
        rank: Global rank, 0-based; ``None`` where a log does not say.
        ending: ``raised`` an exception, ``exited`` with a failure, ``hung`` without progress,
            ``killed`` from outside, or ``ended`` well.
        at: Seconds since the epoch; ``None`` where unknown.
        place: ``file:line`` of the innermost line of the user's own code.
        errors: The exceptions, the first raised first; empty where there was none.
        stack: Where the main thread was, outermost frame first.
        steps: Optimizer steps made before.
        memory: Bytes, by name: ``cuda_allocated``, ``cuda_peak``, ``host_peak``, ….
        models: The models alive then.
        regions: Calls of checkpointed regions until then, by variant.
        notes: What else was learned, one sentence each.
    """

    rank: int | None
    ending: Ending
    at: float | None = None
    place: str | None = None
    errors: tuple[Raised, ...] = ()
    stack: tuple[Frame, ...] = ()
    steps: int | None = None
    memory: dict[str, int] | None = None
    models: tuple[ModelState, ...] = ()
    notes: tuple[str, ...] = ()
    regions: dict[str, int] | None = None


class Crash(Struct, frozen=True):
    """The evidence of a failed run, in addition to its verdict.

    Attributes:
        kind: An exception (``raised``), a failing exit status (``exited``), no progress
            (``hung``), or an end from outside (``killed``).
        rank: The rank that failed first; ``None`` where that is not known.
        headline: The failure in one sentence.
        phase: What the run was doing, in words.
        ranks: Every rank that left word, ascending.
        traceback: The first failure as Python prints it; ``None`` where there was no exception.
    """

    kind: Literal["raised", "exited", "hung", "killed"]
    rank: int | None
    headline: str
    phase: str | None
    ranks: tuple[RankEnd, ...]
    traceback: str | None = None


def is_from_handler(error: BaseException) -> bool:
    """Has a signal handler of the script raised the exception, whatever code it interrupted?"""
    handlers = {code_of(signal.getsignal(one)) for one in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def code_of(function: Any) -> CodeType | None:
    """The Python code that it runs; no object is asked for an attribute, since that may run
    anything.
    """
    while isinstance(function, partial):
        function = function.func
    if type(function) is MethodType:
        function = function.__func__
    if callable(function) and type(function) is not FunctionType:
        function = inspect.getattr_static(type(function), "__call__", None)
    return function.__code__ if type(function) is FunctionType else None
