"""The one result: what `analyze --format json` prints and every report is made from.

A :class:`Result` is plain data. Times are milliseconds unless a name ends in ``_us``,
shares lie in 0..1, percentages in 0..100, and what is not known is ``None``, never 0.
``to_json`` writes it, ``from_json`` reads it back with every field checked, and
``json_schema`` describes it (shipped as ``result.schema.json``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from recompute_scan.crash import Crash
from recompute_scan.encoding import encodable
from recompute_scan.errors import InputError

SCHEMA = "recompute-scan/1"

Verdict = Literal["none", "partial", "full", "doubled", "inconclusive"]
EvidenceLevel = Literal["annotated", "autograd", "kernels"]
Level = Literal["high", "medium", "low"]
Variant = Literal["reentrant", "non-reentrant"]
Outcome = Literal[
    "helps",
    "slower",
    "no-gain",
    "unclear",
    "losses-differ",
    "not-applied",
    "failed",
    "not-tried",
]
# Outcomes whose figures say what the fix does to a step.
MEASURED: tuple[Outcome, ...] = ("helps", "slower", "no-gain", "losses-differ")


@dataclass(frozen=True)
class Attention:
    """Attention calls in one step; forward counts the original run only."""

    forward_per_step: float
    recomputed_per_step: float
    backward_per_step: float


@dataclass(frozen=True)
class Step:
    """One optimizer step as recorded. ``start_us`` is on the trace's own clock."""

    index: int
    start_us: float
    duration_ms: float
    complete: bool
    micro_batches: int
    forward_ops: int
    recomputed_ops: int


@dataclass(frozen=True)
class Family:
    """One family of operators (attention, gemm, …): calls and replay time in one step."""

    family: str
    kind: str
    forward_per_step: float
    recomputed_per_step: float
    backward_per_step: float
    recompute_ms_per_step: float


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint around a region; ``depth`` 0 is the outermost.

    ``variant`` is ``None`` where the trace cannot tell. ``call_site`` is ``file:line`` of the
    code that asked for the checkpoint, ``source`` that line's text. ``options`` are what a
    recorded run saw of the call: ``early-stop-off``; ``selective`` (it has a ``context_fn``);
    ``counts-runs`` (a module inside keeps running statistics).
    """

    depth: int
    variant: Variant | None
    mechanism: str | None = None
    call_site: str | None = None
    source: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """One block of the forward pass, in forward order: how often it ran again, at what price.

    ``checkpoints`` stand outermost first and are empty for a block that is not checkpointed.
    ``replays_by_step`` has a number for each of the result's steps, in their order: ``None`` where
    the step is not whole or the block did not run in it.
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
    surplus_ms_per_step: float
    checkpoints: tuple[Checkpoint, ...] = ()
    replays_by_step: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Breakdown:
    """Where one step's time goes on the device that limits it, in ms; sums to the step."""

    forward: float
    recompute: float
    surplus: float
    backward: float
    optimizer: float
    other: float


@dataclass(frozen=True)
class Cost:
    """What the replays cost. ``step_ms`` is a median over steps; see ``method``.

    ``predicted_step_ms`` is the step after the fix, with its interval. ``saving_pct`` is what
    goes, as a share of the step as it is now: so much throughput is lost today. (More time than
    needed is the same difference as a share of the step after: 248.88 s where 185.07 s is enough
    are 34.5 % more time and 25.6 % lost throughput.) It is below 0 where the fix would cost time.
    ``doubt_ms`` says what the prediction could be off by, by cause (95 %); the interval holds all
    of them and the spread of the steps. ``bare_step_ms`` is the step without any recompute.
    """

    step_ms: float
    step_source: Literal["timed", "trace"]
    device: Literal["cpu", "gpu"]
    recompute_ms: float
    surplus_recompute_ms: float
    repeated_collectives_ms: float | None
    predicted_step_ms: float
    predicted_low_ms: float
    predicted_high_ms: float
    saving_pct: float
    breakdown: Breakdown
    method: str
    assumptions: tuple[str, ...] = ()
    replay_error_pct: float | None = None
    doubt_ms: dict[str, float] | None = None
    bare_step_ms: float | None = None
    bare_low_ms: float | None = None
    bare_high_ms: float | None = None


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one step, and what share of the device's peak they reach.

    Matrix products, convolutions and attention are counted. ``recompute`` holds all replays,
    ``surplus`` those beyond the first; the optimizer's own are in none. ``mfu`` and ``hfu`` are
    shares of ``peak_tflops``, without and with the replays. ``uncounted`` names costly operators
    that could not be counted, so that the figures are lower bounds; ``reason`` says why there
    are none.
    """

    forward_per_step: float | None = None
    backward_per_step: float | None = None
    recompute_per_step: float | None = None
    surplus_per_step: float | None = None
    hfu_over_mfu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_tflops: float | None = None
    peak_source: str | None = None
    uncounted: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class RegionMemory:
    """What the checkpoint of one region keeps out of memory between forward and backward.

    ``ordinal`` is the region's; ``saved_bytes`` is for one micro-batch, ``None`` where the region
    was not replayed while memory was recorded.
    """

    ordinal: int
    saved_bytes: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """The step time and the peak if the regions of these ordinals were not checkpointed."""

    regions: tuple[int, ...]
    step_ms: float
    peak_bytes: int


@dataclass(frozen=True)
class Memory:
    """Memory of one device in one recorded step, and what fewer checkpoints would take of it.

    ``budget_bytes`` is what torch may allocate at most: the capacity without ``reserve_bytes``
    and without what it reserved beyond what it allocated. ``plans`` are the fastest for their
    memory, from the step as it is (surplus replays taken out) to none checkpointed; ``chosen``
    is the place of the fastest that fits. ``reason`` says why there are no plans.
    """

    device: Literal["cpu", "gpu"]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    capacity_bytes: int | None
    reserve_bytes: int | None
    budget_bytes: int | None
    regions: tuple[RegionMemory, ...]
    plans: tuple[MemoryPlan, ...] = ()
    chosen: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Hta:
    """What Holistic Trace Analysis says of the trace; percentages of the GPU's time.

    That time reaches from the first kernel to the last, over all recorded steps. ``overlap_pct``
    is the part of communication that runs beside computation, ``None`` without any;
    ``kernel_types`` are shares of the busy time, of each kind alone and of kinds side by side.
    """

    kernel_time_ms: float
    idle_pct: float
    compute_pct: float
    non_compute_pct: float
    overlap_pct: float | None
    kernel_types: dict[str, float]


@dataclass(frozen=True)
class Fix:
    """What to change. ``disposition`` is ``safe`` only where results cannot change.

    ``removes`` is the checkpoint that the change takes out, where one can be told. ``reason``
    says why the change needs a look where it is ``review``.
    """

    summary: str
    disposition: Literal["safe", "review"]
    diff: str | None
    keep: str
    remove: str
    docs: str
    removes: Checkpoint | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Finding:
    """One problem found, with the evidence for it."""

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


@dataclass(frozen=True)
class Checked:
    """What became of one rule."""

    code: str
    name: str
    status: Literal["found", "clean", "not-applicable", "error"]
    why: str | None = None


@dataclass(frozen=True)
class ProofOp:
    """One operator drawn on the timeline. Times are on the trace's own clock."""

    name: str
    family: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class ProofLane:
    """One run of the same block: the original, a replay, or its backward."""

    label: str
    kind: Literal["forward", "replay", "surplus", "backward"]
    start_us: float
    duration_us: float
    ops: tuple[ProofOp, ...]


@dataclass(frozen=True)
class Proof:
    """One block enlarged: the same operators in the forward pass and in each replay."""

    region: int
    step: int
    lanes: tuple[ProofLane, ...]


@dataclass(frozen=True)
class Rank:
    """One rank's own answer.

    ``replays_per_block`` is the mean over its blocks, ``recompute_ms`` what replays take of a
    step; ``None`` without a verdict.
    """

    rank: int
    trace: str
    verdict: Verdict
    step_ms: float | None
    replays_per_block: float | None = None
    recompute_ms: float | None = None


@dataclass(frozen=True)
class Arm:
    """One way of running the script (unchanged, with the fix, …), measured without the profiler.

    ``status`` says whether it came through. The step time is the median of all timed steps of
    all ``runs``; ``low`` and ``high`` hold the 95 % interval of every run's own median, so that
    they show how far the runs differ too. Memory is the peak over the timed steps, of the rank
    that needs most: allocated and reserved on the GPU, resident of the process.
    ``recompute_per_backward`` and ``verdict`` are read off a trace recorded after the timing.
    """

    status: Literal["measured", "out-of-memory", "failed"]
    message: str | None = None
    runs: int = 0
    timed_steps: int = 0
    step_ms: float | None = None
    step_low_ms: float | None = None
    step_high_ms: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = None
    verdict: Verdict | None = None
    recompute_per_backward: float | None = None


@dataclass(frozen=True)
class Losses:
    """The losses of the unchanged script beside those with the fix, in order of backward passes.

    ``status`` is ``equal`` only where all bits are; ``not-repeatable`` where the unchanged script
    gave other losses the second time, and nothing can be said of the fix; ``not-seen`` where no
    scalar went through ``backward``. Differences are the largest absolute ones.
    """

    status: Literal["equal", "different", "not-repeatable", "not-seen"]
    compared: int = 0
    largest_difference: float | None = None
    repeat_difference: float | None = None
    seeded_by_script: bool | None = None


@dataclass(frozen=True)
class Verified:
    """The fix applied in memory and measured, beside the unchanged script.

    ``outcome``: ``helps`` or ``slower`` where the intervals leave no doubt, ``no-gain`` where
    they leave room for a small saving or loss only, ``unclear`` where they are too wide for
    that, ``losses-differ`` whatever the time, ``not-applied`` where no checkpoint could be taken
    out, ``failed`` where the script did not come through, ``not-tried`` where there was no fix
    to try. Percentages are of the step before (``saving_pct``) and of the step after
    (``more_time_pct``). ``before_peak_bytes`` and ``after_peak_bytes`` are what is allocated on
    a GPU, else the resident memory of the process.
    """

    outcome: Outcome
    removed: tuple[Checkpoint, ...]
    before_step_ms: float | None
    after_step_ms: float | None
    saving_ms: float | None
    saving_low_ms: float | None
    saving_high_ms: float | None
    saving_pct: float | None
    more_time_pct: float | None
    before_peak_bytes: int | None
    after_peak_bytes: int | None
    losses_equal: bool | None
    losses: Losses
    before: Arm
    after: Arm | None = None
    without_checkpointing: Arm | None = None


@dataclass(frozen=True)
class Result:
    """Everything that was found out about one run."""

    tool_version: str
    verdict: Verdict
    evidence_level: EvidenceLevel
    confidence: Level
    reason: str | None
    headline: str
    recompute_per_backward: float | None
    mean_recompute: float | None
    recomputed_share: float | None
    attention: Attention | None
    steps: tuple[Step, ...]
    families: tuple[Family, ...]
    regions: tuple[Region, ...]
    cost: Cost | None
    findings: tuple[Finding, ...]
    checked: tuple[Checked, ...]
    ranks: tuple[Rank, ...]
    health: dict[str, int]
    environment: dict[str, str]
    warnings: tuple[str, ...]
    proof: Proof | None = None
    verified: Verified | None = None
    flops: Flops | None = None
    memory: Memory | None = None
    crash: Crash | None = None
    hta: Hta | None = None
    schema: str = field(default=SCHEMA)


def to_json(result: Result, *, indent: int = 2) -> str:
    """The result as JSON text, ``schema`` first; the same result gives the same bytes."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    ordered = {"schema": fields.pop("schema"), **fields}
    try:
        encoded = msgspec.json.encode(ordered)
    except UnicodeEncodeError:
        # The name of a file that is no UTF-8 holds halves of surrogate pairs.
        encoded = msgspec.json.encode(encodable(ordered))
    return msgspec.json.format(encoded, indent=indent).decode() + "\n"


def from_json(text: str | bytes) -> Result:
    """A result read back from :func:`to_json`.

    Raises:
        InputError: The text is not JSON (``E302``), or not a result of this schema (``E305``).
    """
    try:
        result = msgspec.json.decode(text, type=Result)
    except msgspec.ValidationError as error:
        raise InputError(
            "E305",
            "This JSON is not a recompute-scan result.",
            why=str(error),
            hint="give the result.json that `recompute-scan run` or `analyze --format json` wrote",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError("E302", "This file is not JSON.", why=str(error)) from None
    if result.schema != SCHEMA:
        raise InputError(
            "E305",
            f"This result has the schema {result.schema!r}; this version reads {SCHEMA!r}.",
        )
    return result


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of the document that :func:`to_json` writes."""
    return closed_schema(Result, "recompute-scan result", SCHEMA)


def closed_schema(document: type, title: str, name: str) -> dict[str, Any]:
    """A JSON Schema of a document of ours: every field is there, no other is, and ``schema``
    is the given name.
    """
    schema = msgspec.json.schema(document)
    # Defaults make fields optional when reading; a written document has them all.
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["required"] = list(definition["properties"])
            definition["additionalProperties"] = False
    schema["$defs"][document.__name__]["properties"]["schema"] = {"const": name}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **schema,
    }
