"""The sections of the report in their order, which every rendering follows."""

from __future__ import annotations

from recompute_scan.report.section import Section
from recompute_scan.report.sections import (
    block_by_block,
    checkpoint_sites,
    compiled_code,
    device_use,
    every_rule,
    failure,
    findings_and_fixes,
    first_screen,
    how_to_check,
    hta_figures,
    measured_fix,
    memory_snapshots,
    method,
    planned_checkpoints,
    rank_by_rank,
    recomputed_by_design,
    run_by_run,
    same_computation,
    selective_policies,
    step_cost,
    steps_and_families,
    trace_health,
)
from recompute_scan.result import Result

SECTIONS: tuple[Section, ...] = (
    failure.SECTION,
    planned_checkpoints.SECTION,
    first_screen.SECTION,
    measured_fix.SECTION,
    step_cost.SECTION,
    run_by_run.SECTION,
    block_by_block.SECTION,
    recomputed_by_design.SECTION,
    rank_by_rank.SECTION,
    checkpoint_sites.SECTION,
    compiled_code.SECTION,
    findings_and_fixes.SECTION,
    same_computation.SECTION,
    selective_policies.SECTION,
    memory_snapshots.SECTION,
    how_to_check.SECTION,
    device_use.SECTION,
    hta_figures.SECTION,
    every_rule.SECTION,
    steps_and_families.SECTION,
    trace_health.SECTION,
    method.SECTION,
)


def sections_of(result: Result) -> tuple[Section, ...]:
    """Those that this result has, in the order in which they are read."""
    return tuple(section for section in SECTIONS if section.present(result))
