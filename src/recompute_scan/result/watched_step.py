"""Repeated and unused work of a watched training step, and memory that it kept unused."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

WorkKind = Literal["repeated", "repeated-rows", "unread", "unread-gradient", "unread-recompute"]
KeptKind = Literal["between", "after-backward", "never-read"]
Reuse = Literal["", "detach", "retain-graph"]


class Work(Struct, frozen=True, omit_defaults=True):
    """Operators of one step that it could do without.

    Attributes:
        kind: ``repeated``: they compute what others have computed in the step, from the same
            values. ``repeated-rows``: a forward without gradients of rows that another
            forward computes, too. ``unread``: nothing reads their results. ``unread-gradient``:
            they compute gradients that nothing reads. ``unread-recompute``: a recompute runs them,
            and nothing reads their results.
        operators: How many.
        ms: Their time in the watched step, with the backward pass that they cause. Of operators
            with one unread gradient of two, half.
        share: Their share of all operators' time in the step, 0 to 1.
        line: ``file:line`` of the outermost module call that they make up, or of the operators.
        module: Name of the module; empty for several, and outside of modules.
        module_class: Class of the modules; empty for several classes.
        calls: Module calls that they make up; 0 where they are single operators.
        same_as: ``file:line`` of the others that compute the same.
        least_ms: The least that a step saves without them; 0 where that is unknown.
        most_ms: The most: their share of a whole step, the time between operators included.
            ``None`` where no step was timed.
        needs: What it takes to use the other's result: ``detach``, or to keep its graph.
        rows: Of ``repeated-rows``: rows of the batch that are computed twice.
        of_rows: All rows of that batch.
    """

    kind: WorkKind
    operators: int
    ms: float
    share: float
    line: str
    module: str = ""
    module_class: str = ""
    calls: int = 0
    same_as: str = ""
    least_ms: float = 0.0
    most_ms: float | None = None
    needs: Reuse = ""
    rows: int = 0
    of_rows: int = 0


class Kept(Struct, frozen=True, omit_defaults=True):
    """Memory of one step that no later operator needed as long as it was kept.

    Attributes:
        kind: ``between``: results between the checkpointed parts of a layer, kept for the backward
            pass because the layer itself is not checkpointed. ``after-backward``: recomputed, and
            alive after the backward pass; or read by it last, and alive at the next step's peak.
            ``never-read``: alive during the backward pass, and read neither in it nor in a
            recompute.
        bytes: How much.
        tensors: In how many storages.
        line: ``file:line`` that made the first of them.
        module_class: Class of the layers, of ``between``.
        layers: How many layers, of ``between``.
        holder: What Python object holds it, with its line, where one was found.
    """

    kind: KeptKind
    bytes: int
    tensors: int
    line: str
    module_class: str = ""
    layers: int = 0
    holder: str = ""


class WatchedStep(Struct, frozen=True, omit_defaults=True):
    """The use of each operator of one step.

    Attributes:
        operators: Operators in the step.
        ms: Their time together.
        recomputed_ms: Of it, recomputes that checkpoints ask for.
        work: What the step could do without, most time first.
        small_ms: Time of further such operators, each group below the floor.
        library_ms: Time of such operators inside installed packages, which the program's author
            cannot change.
        kept: Memory that was kept longer than it was needed, largest first.
        peak_bytes: The most that was alive at one moment, without what was there before the step
            and weights that FSDP gathered.
        peak_in: Where that moment was: ``forward``, ``recompute`` or ``backward``.
        hidden: Why unread results could not be found; ``None`` where they could.
        untold: Why the step could not be watched; ``None`` where it was.
    """

    operators: int = 0
    ms: float = 0.0
    recomputed_ms: float = 0.0
    work: tuple[Work, ...] = ()
    small_ms: float = 0.0
    library_ms: float = 0.0
    kept: tuple[Kept, ...] = ()
    peak_bytes: int = 0
    peak_in: str = ""
    hidden: str | None = None
    untold: str | None = None
