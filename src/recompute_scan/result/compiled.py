"""What compiled code runs again by itself, as its own graphs say."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# Who asked: a checkpoint in the compiled code, the compiler of its own accord, or its budget.
Why = Literal["checkpoint", "compiler", "budget"]


class CompiledRecompute(Struct, frozen=True):
    """Operators of one kind in one place that a compiled backward pass runs again.

    ``operators`` is their number in the graph, ``times`` how often each runs again in one backward
    pass, ``source`` is ``file:line`` of the model's code. ``free`` work is fused with what needs
    it. ``random`` operators draw random numbers; ``redrawn`` says that they run again without the
    random state of their first run.
    """

    operator: str
    module: str | None
    source: str | None
    operators: int
    times: int
    why: Why
    free: bool
    random: bool
    redrawn: bool = False


class CompiledGraph(Struct, frozen=True):
    """One compiled forward graph with its backward graph.

    ``name`` is the profiler's ``frame/version``. ``operators`` do work in the forward graph, views
    left out; ``recomputed`` of them run again in the backward graph, ``free`` of these cost
    nothing to speak of. ``saved_bytes`` is what the forward keeps for the backward, weights and
    inputs left out. ``checkpoints`` are call sites in the compiled code. ``calls_per_step`` is
    ``None`` where no trace tells.
    """

    name: str
    calls_per_step: float | None
    operators: int
    recomputed: int
    free: int
    saved_bytes: int
    memory_budget: float | None
    checkpoints: tuple[str, ...]
    recomputes: tuple[CompiledRecompute, ...]


class CompiledCode(Struct, frozen=True):
    """The compiled code of the recorded steps.

    ``unknown`` names compiled calls whose graphs are not here, ``graph_breaks`` why the compiler
    left code to Python.
    """

    graphs: tuple[CompiledGraph, ...]
    unknown: tuple[str, ...]
    graph_breaks: tuple[str, ...]
