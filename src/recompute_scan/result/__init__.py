"""Result classes, as written to ``result.json``.

A :class:`Result` is plain data. Times are milliseconds unless a name ends in ``_us``,
shares lie in 0..1, percentages in 0..100, and what is not known is ``None``, never 0.
``to_json`` writes it, ``from_json`` reads it back with every field checked, and
``json_schema`` describes it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from recompute_scan.crash import Crash
from recompute_scan.errors import InputError
from recompute_scan.files import decoded, document
from recompute_scan.result.cost import MEASURED as MEASURED
from recompute_scan.result.cost import ActivationPlan as ActivationPlan
from recompute_scan.result.cost import Arm as Arm
from recompute_scan.result.cost import Breakdown as Breakdown
from recompute_scan.result.cost import Cost as Cost
from recompute_scan.result.cost import DeviceTime as DeviceTime
from recompute_scan.result.cost import Flops as Flops
from recompute_scan.result.cost import GradientDistance as GradientDistance
from recompute_scan.result.cost import Gradients as Gradients
from recompute_scan.result.cost import Hta as Hta
from recompute_scan.result.cost import Losses as Losses
from recompute_scan.result.cost import Memory as Memory
from recompute_scan.result.cost import MemoryPlan as MemoryPlan
from recompute_scan.result.cost import Outcome as Outcome
from recompute_scan.result.cost import PlannedModule as PlannedModule
from recompute_scan.result.cost import PlanOutcome as PlanOutcome
from recompute_scan.result.cost import PlanPoint as PlanPoint
from recompute_scan.result.cost import PlanProof as PlanProof
from recompute_scan.result.cost import RegionMemory as RegionMemory
from recompute_scan.result.cost import Verified as Verified
from recompute_scan.result.cost import WithPlan as WithPlan
from recompute_scan.result.fidelity import Fidelity, Policies
from recompute_scan.result.recompute import DOUBLED as DOUBLED
from recompute_scan.result.recompute import DOUBLED_LEAD as DOUBLED_LEAD
from recompute_scan.result.recompute import Attention as Attention
from recompute_scan.result.recompute import ByDesign as ByDesign
from recompute_scan.result.recompute import Checked as Checked
from recompute_scan.result.recompute import Checkpoint as Checkpoint
from recompute_scan.result.recompute import CompiledCode as CompiledCode
from recompute_scan.result.recompute import CompiledGraph as CompiledGraph
from recompute_scan.result.recompute import CompiledRecompute as CompiledRecompute
from recompute_scan.result.recompute import CrossCheck as CrossCheck
from recompute_scan.result.recompute import EvidenceLevel as EvidenceLevel
from recompute_scan.result.recompute import Family as Family
from recompute_scan.result.recompute import Finding as Finding
from recompute_scan.result.recompute import Fix as Fix
from recompute_scan.result.recompute import Level as Level
from recompute_scan.result.recompute import PlainCount as PlainCount
from recompute_scan.result.recompute import Proof as Proof
from recompute_scan.result.recompute import ProofLane as ProofLane
from recompute_scan.result.recompute import ProofOp as ProofOp
from recompute_scan.result.recompute import Rank as Rank
from recompute_scan.result.recompute import Region as Region
from recompute_scan.result.recompute import Step as Step
from recompute_scan.result.recompute import Variant as Variant
from recompute_scan.result.recompute import Verdict as Verdict
from recompute_scan.result.run_record import NextCommand
from recompute_scan.result.watched_step import WatchedStep

SCHEMA = "recompute-scan/1"

# By the frames of the stack. ``kept``: a policy of a selective checkpoint keeps it. ``checkpoint``:
# made inside a checkpointed call, and not freed with it. ``unknown``: the stack is not known, or
# is the backward thread's, which has no Python frames.
HeldKind = Literal[
    "kept", "checkpoint", "recompute", "forward", "backward", "optimizer", "other", "unknown"
]


class HeldBy(Struct, frozen=True):
    """Bytes at the peak that one line asked for, the innermost outside torch; empty if unknown."""

    kind: HeldKind
    site: str
    bytes: int
    blocks: int


class MemorySnapshot(Struct, frozen=True):
    """One device of one snapshot.

    Attributes:
        file: Name of the snapshot.
        device: Number of the GPU.
        peak_bytes: Most bytes in use that its history shows.
        end_bytes: Bytes in use when it was taken.
        reserved_bytes: What the allocator held of the device then.
        events: Allocations and releases in its history; 0 where none was recorded.
        out_of_memory: Requests that failed.
        by_kind: Bytes at the peak, by the stack.
        held: The largest holders by line, of all of ``by_kind``.
    """

    file: str
    device: int
    peak_bytes: int
    end_bytes: int
    reserved_bytes: int
    events: int
    out_of_memory: int
    by_kind: dict[str, int]
    held: tuple[HeldBy, ...]


class Result(Struct, frozen=True):
    """Everything that was found out about one run.

    ``next_steps`` is for programs that read the JSON: a report makes the list anew, since people
    paste the commands that it shows.
    """

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
    cross_check: CrossCheck | None = None
    proof: Proof | None = None
    verified: Verified | None = None
    flops: Flops | None = None
    memory: Memory | None = None
    fidelity: Fidelity | None = None
    crash: Crash | None = None
    hta: Hta | None = None
    compiled: CompiledCode | None = None
    by_design: tuple[ByDesign, ...] = ()
    policies: Policies | None = None
    snapshots: tuple[MemorySnapshot, ...] = ()
    plan: ActivationPlan | None = None
    watched: WatchedStep | None = None
    next_steps: tuple[NextCommand, ...] = ()
    schema: str = field(default=SCHEMA)


def to_json(result: Result, *, indent: int = 2) -> str:
    """The result as JSON text, ``schema`` first; the same result gives the same bytes."""
    return write_document(result, indent)


def write_document(struct: Struct, indent: int = 2) -> str:
    """A document of ours as JSON text, ``schema`` first."""
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    return document({"schema": fields.pop("schema"), **fields}, indent).decode()


def from_json(text: str | bytes) -> Result:
    """A result read back from :func:`to_json`.

    Raises:
        InputError: The text is not JSON (``E302``), or not a result of this schema (``E305``).
    """
    try:
        result = decoded(text.encode() if isinstance(text, str) else text, Result)
    except msgspec.ValidationError as error:
        raise InputError(
            "E305",
            "This JSON is not a recompute-scan result.",
            why=str(error),
            hint="give the result.json that `recompute-scan run` or `analyze --format json` wrote",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("E302", "This file is not JSON.", why=str(error)) from None
    if result.schema != SCHEMA:
        raise InputError(
            "E305",
            f"This result has the schema {result.schema!r}; this version reads {SCHEMA!r}.",
        )
    return result


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of the document that :func:`to_json` writes."""
    return make_schema(Result, "recompute-scan result", SCHEMA)


def make_schema(kind: type, title: str, name: str) -> dict[str, Any]:
    """A JSON Schema of a document of ours: every field is there, no other is, and ``schema``
    is the given name.
    """
    schema = msgspec.json.schema(kind)
    # Defaults make fields optional when reading; a written document has them all.
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["required"] = list(definition["properties"])
            definition["additionalProperties"] = False
    schema["$defs"][kind.__name__]["properties"]["schema"] = {"const": name}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return head | schema
