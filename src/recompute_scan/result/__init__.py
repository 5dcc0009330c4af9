"""The one result: what `analyze --format json` prints and every report is made from.

A :class:`Result` is plain data. Times are milliseconds unless a name ends in ``_us``,
shares lie in 0..1, percentages in 0..100, and what is not known is ``None``, never 0.
``to_json`` writes it, ``from_json`` reads it back with every field checked, and
``json_schema`` describes it (shipped as ``result.schema.json``).
"""

from recompute_scan.result.advice import (
    Checked,
    Finding,
    Fix,
)
from recompute_scan.result.document import (
    SCHEMA,
    Result,
    closed_schema,
    from_json,
    json_schema,
    to_json,
)
from recompute_scan.result.measured import (
    MEASURED,
    Arm,
    Losses,
    Outcome,
    Verified,
    WithPlan,
)
from recompute_scan.result.price import (
    Breakdown,
    Cost,
    DeviceTime,
    Flops,
    Hta,
    Memory,
    MemoryPlan,
    RegionMemory,
)
from recompute_scan.result.replays import (
    Attention,
    Checkpoint,
    CrossCheck,
    EvidenceLevel,
    Family,
    Level,
    PlainCount,
    Proof,
    ProofLane,
    ProofOp,
    Rank,
    Region,
    Step,
    Variant,
    Verdict,
)

__all__ = [
    "MEASURED",
    "SCHEMA",
    "Arm",
    "Attention",
    "Breakdown",
    "Checked",
    "Checkpoint",
    "Cost",
    "CrossCheck",
    "DeviceTime",
    "EvidenceLevel",
    "Family",
    "Finding",
    "Fix",
    "Flops",
    "Hta",
    "Level",
    "Losses",
    "Memory",
    "MemoryPlan",
    "Outcome",
    "PlainCount",
    "Proof",
    "ProofLane",
    "ProofOp",
    "Rank",
    "Region",
    "RegionMemory",
    "Result",
    "Step",
    "Variant",
    "Verdict",
    "Verified",
    "WithPlan",
    "closed_schema",
    "from_json",
    "json_schema",
    "to_json",
]
