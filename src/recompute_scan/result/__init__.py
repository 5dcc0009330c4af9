"""Result classes, as written to ``result.json``.

A :class:`Result` is plain data. Times are milliseconds unless a name ends in ``_us``,
shares lie in 0..1, percentages in 0..100, and what is not known is ``None``, never 0.
``to_json`` writes it, ``from_json`` reads it back with every field checked, and
``json_schema`` describes it.
"""

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
from recompute_scan.result.document import SCHEMA as SCHEMA
from recompute_scan.result.document import HeldBy as HeldBy
from recompute_scan.result.document import MemorySnapshot as MemorySnapshot
from recompute_scan.result.document import Result as Result
from recompute_scan.result.document import from_json as from_json
from recompute_scan.result.document import json_schema as json_schema
from recompute_scan.result.document import make_schema as make_schema
from recompute_scan.result.document import to_json as to_json
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
