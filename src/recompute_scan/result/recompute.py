"""Steps, blocks, checkpoints, ranks, compiled code and the proof; findings and their fixes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

# The cause: a checkpoint in the compiled code, the compiler's own choice, or its budget.
Why = Literal["checkpoint", "compiler", "budget"]
Verdict = Literal["none", "partial", "full", "doubled", "inconclusive"]
EvidenceLevel = Literal["annotated", "autograd", "kernels", "graphs", "hooks"]
Level = Literal["high", "medium", "low"]
Variant = Literal["reentrant", "non-reentrant"]
# The code of the finding that goes with the verdict doubled; the check asks for it.
DOUBLED = "RS001"
# How the headline of that verdict begins.
DOUBLED_LEAD = "Checkpointing is doubled: "


class Attention(Struct, frozen=True):
    """Attention calls in one step; forward counts the original run only."""

    forward_per_step: float
    recomputed_per_step: float
    backward_per_step: float


class PlainCount(Struct, frozen=True):
    """One name of forward operators, counted over the whole trace.

    ``outside`` and ``inside`` any backward pass, by name and time alone; ``in_hooks`` are those
    inside that a gradient hook ran, ``matched`` those that the answer says were recomputed.
    """

    name: str
    outside: int
    inside: int
    in_hooks: int
    matched: int


class CrossCheck(Struct, frozen=True):
    """The count that anyone can redo, for comparison with the answer's.

    ``agrees`` is ``None`` where the trace has no operator that only a forward pass has. Attention
    comes first, then the names that occur most.
    """

    agrees: bool | None
    counts: tuple[PlainCount, ...]


class Step(Struct, frozen=True):
    """One optimizer step as recorded. ``start_us`` is on the trace's own clock."""

    index: int
    start_us: float
    duration_ms: float
    complete: bool
    micro_batches: int
    forward_ops: int
    recomputed_ops: int


class Family(Struct, frozen=True):
    """One family of operators (attention, gemm, …): calls and recompute time in one step."""

    family: str
    kind: str
    forward_per_step: float
    recomputed_per_step: float
    backward_per_step: float
    recompute_ms_per_step: float


class ByDesign(Struct, frozen=True):
    """A function's forward that other functions run again in their gradients: a model's design.

    Counts are per recorded step, over ``inside``, the functions that do so; kernels and their time
    are of the second runs, ``kernels`` 0 and the time the host's where none is recorded. A function
    inside itself alone ran its own block: ``with_gradients`` for its gradient, in parts perhaps;
    else to get its input back, as a reversible layer does.
    """

    function: str
    inside: Annotated[tuple[str, ...], Meta(min_length=1)]
    forward_per_step: float
    recomputed_per_step: float
    kernels_per_step: float
    recompute_ms_per_step: float
    with_gradients: bool = False


_EXTENTS = {
    "block": "around each block",
    "several": "around several blocks at once",
    "part": "around a part of each block",
}


class Checkpoint(Struct, frozen=True):
    """One checkpoint around a region; ``depth`` 0 is the outermost.

    ``variant`` is ``None`` where the trace does not show it. ``call_site`` is ``file:line`` of the
    code that asked for the checkpoint, ``source`` that line's text. ``options`` are what a
    recorded run saw of the call: ``early-stop-off``; ``selective`` (it has a ``context_fn``);
    ``counts-runs`` (a module inside keeps running statistics); ``in-parts`` (a function that goes
    through its block part by part, as the trace shows); or ``compiled``: the checkpoint is inside
    compiled code, where variants do not differ. ``function`` names what checkpoints where
    no mechanism is known for it: an autograd function of the project's own by its class, a
    library's code by ``module.function``. ``around`` is ``several`` where it encloses other blocks
    as well, which make up a module of ``module_class`` where that is known, and ``part`` where it
    encloses a part of the block.
    """

    depth: int
    variant: Variant | None
    mechanism: str | None = None
    call_site: str | None = None
    source: str | None = None
    options: tuple[str, ...] = ()
    function: str | None = None
    around: Literal["block", "several", "part"] = "block"
    module_class: str | None = None

    @property
    def extent(self) -> str:
        """The extent in words: around each block, several, or a part."""
        module = f" ({self.module_class})" if self.module_class else ""
        return _EXTENTS[self.around] + module


class Region(Struct, frozen=True):
    """One block of the forward pass, in forward order: how often it ran again, at what price.

    ``checkpoints`` stand outermost first and are empty for a block that is not checkpointed.
    ``recomputes_by_step`` has a number for each of the result's steps, in their order: ``None``
    where the step is not whole or the block did not run in it. ``backward_passes`` is how many
    backward passes recomputed one of its forward passes at most; 1 where none did.
    """

    ordinal: int
    module: str | None
    module_class: str | None
    signature: str
    forward_runs_per_step: float
    recompute_runs_per_backward: float
    mean_recompute: float
    forward_ms_per_step: float
    recompute_ms_per_step: float
    redundant_ms_per_step: float
    checkpoints: tuple[Checkpoint, ...] = ()
    recomputes_by_step: tuple[float | None, ...] = ()
    backward_passes: float = 1.0

    @property
    def in_part(self) -> bool:
        """Whether checkpoints around parts of the block run only these parts again so often."""
        parts = any(one.around == "part" for one in self.checkpoints)
        more = self.recompute_runs_per_backward - 1
        return parts and 4 * (self.mean_recompute - 1) < 3 * more


# The recorder's name for a run of modules that one checkpoint covers: ``layers.0-1``.
_SEVERAL = re.compile(r"(^|\.)\d+-\d+$")


def unit_of(regions: Sequence[Region]) -> str:
    """``blocks``, or ``segments`` where a row has several modules."""
    several = any(_SEVERAL.search(region.module or "") for region in regions)
    return "segments" if several else "blocks"


class ProofOp(Struct, frozen=True):
    """One operator drawn on the timeline. Times are on the trace's own clock."""

    name: str
    family: str
    start_us: float
    duration_us: float


class ProofLane(Struct, frozen=True):
    """One run of the same block: the original, a recompute, or its backward."""

    label: str
    kind: Literal["forward", "recompute", "redundant", "backward"]
    start_us: float
    duration_us: float
    ops: tuple[ProofOp, ...]


class Proof(Struct, frozen=True):
    """One block enlarged: the same operators in the forward pass and in each recompute."""

    region: int
    step: int
    lanes: tuple[ProofLane, ...]


class Rank(Struct, frozen=True):
    """One rank's own answer.

    ``recomputes_per_block`` is the mean over its blocks, ``recompute_ms`` what recomputes take of a
    step; ``None`` without a verdict.
    """

    rank: int
    trace: str
    verdict: Verdict
    step_ms: float | None
    recomputes_per_block: float | None = None
    recompute_ms: float | None = None


class Fix(Struct, frozen=True):
    """A change to make. ``disposition`` is ``safe`` only where results cannot change.

    ``removes`` is the checkpoint that the change takes out, where one is known, and
    ``removes_too`` the others of the block that it takes out. ``reason`` says why the change needs
    a look where it is ``review``. ``digest`` is the SHA-256 of the file that ``diff`` changes, as
    it was recorded.
    """

    summary: str
    disposition: Literal["safe", "review"]
    diff: str | None
    keep: str
    remove: str
    docs: str
    removes: Checkpoint | None = None
    reason: str | None = None
    digest: str | None = None
    removes_too: tuple[Checkpoint, ...] = ()

    @property
    def removed(self) -> tuple[Checkpoint, ...]:
        """All that it takes out."""
        return () if self.removes is None else (self.removes, *self.removes_too)


class Finding(Struct, frozen=True):
    """One problem found, with the evidence for it.

    ``wrong_gradients`` says that checkpointing changes the trained model, and not only its cost.
    """

    code: str
    name: str
    severity: Literal["error", "warning", "info"]
    confidence: Level
    title: str
    detail: str
    evidence: tuple[str, ...]
    fix: Fix | None
    saving_ms: float | None
    saving_pct: float | None
    wrong_gradients: bool = False


class Checked(Struct, frozen=True):
    """The outcome of one rule."""

    code: str
    name: str
    status: Literal["found", "clean", "not-applicable", "error"]
    why: str | None = None


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
    ``None`` without a trace that shows it.
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

    ``unknown`` names compiled calls without their graphs, ``graph_breaks`` why the compiler
    left code to Python.
    """

    graphs: tuple[CompiledGraph, ...]
    unknown: tuple[str, ...]
    graph_breaks: tuple[str, ...]
