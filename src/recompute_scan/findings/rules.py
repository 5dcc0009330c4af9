"""All rules, in order of their codes, and the one place that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from recompute_scan.findings import (
    compiled_recompute,
    doubled_checkpoint,
    early_stop_off,
    idle_checkpoint,
    memory_headroom,
    nested_checkpoint,
    reentrant_under_fsdp,
    repeated_collectives,
    selective_checkpoint,
    uneven_recompute,
    untrained_weights,
)
from recompute_scan.findings.base import Evidence, NotApplicable, Rule
from recompute_scan.result import Checked, Finding, Result

RULES = (
    doubled_checkpoint.RULE,
    nested_checkpoint.RULE,
    idle_checkpoint.RULE,
    uneven_recompute.RULE,
    repeated_collectives.RULE,
    reentrant_under_fsdp.RULE,
    compiled_recompute.RULE,
    early_stop_off.RULE,
    untrained_weights.RULE,
    memory_headroom.RULE,
    selective_checkpoint.RULE,
)


def check_all(evidence: Evidence) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    """Findings, and what became of each rule. A rule that breaks never costs the report."""
    findings: list[Finding] = []
    checked: list[Checked] = []
    for rule in RULES:
        found, status = _checked(rule, partial(rule.check, evidence))
        findings.extend(found)
        checked.append(status)
    return tuple(findings), tuple(checked)


def check_ranks(result: Result) -> Result:
    """The result of several ranks, with what only they together show."""
    findings = list(result.findings)
    checked = {one.code: one for one in result.checked}
    for rule in RULES:
        if rule.check_ranks is not None:
            found, checked[rule.code] = _checked(rule, partial(rule.check_ranks, result.ranks))
            findings.extend(found)
    ordered = sorted(findings, key=lambda finding: finding.code)
    return replace(result, findings=tuple(ordered), checked=tuple(checked.values()))


def _checked(
    rule: Rule, check: Callable[[], list[Finding] | NotApplicable]
) -> tuple[list[Finding], Checked]:
    try:
        answer = check()
    except Exception as error:
        return [], Checked(rule.code, rule.name, "error", f"{type(error).__name__}: {error}")
    if isinstance(answer, NotApplicable):
        return [], Checked(rule.code, rule.name, "not-applicable", answer.why)
    return answer, Checked(rule.code, rule.name, "found" if answer else "clean")
