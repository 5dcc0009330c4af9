"""The sections of the report in their order, which every rendering follows."""

from __future__ import annotations

from recompute_scan.report.section import Section
from recompute_scan.report.sections import plan
from recompute_scan.report.sections.answer import (
    EVERY_RULE,
    FAILURE,
    FINDINGS_AND_FIXES,
    FIRST_SCREEN,
    HOW_TO_CHECK,
    METHOD,
)
from recompute_scan.report.sections.correctness import (
    COMPILED_CODE,
    SAME_COMPUTATION,
    SELECTIVE_POLICIES,
)
from recompute_scan.report.sections.cost import DEVICE_USE, HTA_FIGURES, MEASURED_FIX, STEP_COST
from recompute_scan.report.sections.layers import (
    BLOCK_BY_BLOCK,
    CHECKPOINT_SITES,
    RECOMPUTED_BY_DESIGN,
    RUN_BY_RUN,
    STEPS_AND_FAMILIES,
)
from recompute_scan.report.sections.run import MEMORY_SNAPSHOTS, RANK_BY_RANK, TRACE_HEALTH
from recompute_scan.result import Result

SECTIONS: tuple[Section, ...] = (
    FAILURE,
    plan.PLANNED_CHECKPOINTS,
    FIRST_SCREEN,
    MEASURED_FIX,
    STEP_COST,
    RUN_BY_RUN,
    BLOCK_BY_BLOCK,
    RECOMPUTED_BY_DESIGN,
    RANK_BY_RANK,
    CHECKPOINT_SITES,
    COMPILED_CODE,
    FINDINGS_AND_FIXES,
    SAME_COMPUTATION,
    SELECTIVE_POLICIES,
    MEMORY_SNAPSHOTS,
    HOW_TO_CHECK,
    DEVICE_USE,
    HTA_FIGURES,
    EVERY_RULE,
    STEPS_AND_FAMILIES,
    TRACE_HEALTH,
    METHOD,
)


def sections_of(result: Result) -> tuple[Section, ...]:
    """Those that this result has, in the order in which they are read."""
    return tuple(section for section in SECTIONS if section.present(result))
