"""All rules, in order of their codes, and the one place that runs them."""

from __future__ import annotations

from recompute_scan.findings import compiled_recompute, doubled_checkpoint, nested_checkpoint
from recompute_scan.findings.base import Evidence, NotApplicable
from recompute_scan.result import Checked, Finding

RULES = (doubled_checkpoint.RULE, nested_checkpoint.RULE, compiled_recompute.RULE)


def check_all(evidence: Evidence) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    """Findings, and what became of each rule. A rule that breaks never costs the report."""
    findings: list[Finding] = []
    checked: list[Checked] = []
    for rule in RULES:
        try:
            answer = rule.check(evidence)
        except Exception as error:
            checked.append(
                Checked(rule.code, rule.name, "error", f"{type(error).__name__}: {error}")
            )
            continue
        if isinstance(answer, NotApplicable):
            checked.append(Checked(rule.code, rule.name, "not-applicable", answer.why))
            continue
        findings.extend(answer)
        checked.append(Checked(rule.code, rule.name, "found" if answer else "clean"))
    return tuple(findings), tuple(checked)
