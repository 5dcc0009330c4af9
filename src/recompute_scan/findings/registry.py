"""All rules, in order of their codes, and the one place that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from msgspec.structs import replace

from recompute_scan.findings.base import Evidence, NotApplicable, Rule
from recompute_scan.frameworks.detect import NAMES
from recompute_scan.result import Checked, Finding, Result
from recompute_scan.result.fidelity import ComparedGradients
from recompute_scan.result.patch import file_of
from recompute_scan.result.run_record import Source, file_of_site

# Modules of this folder with rules.
_MODULES = ("doubled", "distributed", "compiled", "fidelity", "policies", "waste")


def _rules_of(name: str) -> list[Rule]:
    module = import_module(f"{__package__}.{name}")
    return [value for value in vars(module).values() if isinstance(value, Rule)]


# In the order of their codes.
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for name in _MODULES for rule in _rules_of(name)), key=lambda rule: rule.code)
)
# Of all findings that a result can hold; failures have no rule.
CODES = sorted({*NAMES, *(rule.code for rule in RULES)})


def check_all(evidence: Evidence) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    """Findings, and what became of each rule. A rule that breaks never costs the report."""
    answers = [_checked(rule, evidence) for rule in RULES]
    findings = tuple(one for found, _ in answers for one in found)
    return findings, tuple(status for _, status in answers)


def settle(result: Result, gradients: ComparedGradients, sources: Mapping[str, Source]) -> Result:
    """The result, once gradients were compared with those without checkpoints."""
    evidence = Evidence(
        sources=sources, untrained=(), fidelity=result.fidelity, gradients=gradients
    )
    findings = list(result.findings)
    for rule in RULES:
        if rule.wrong_gradients and rule.needs == "comparison":
            found, _ = _checked(rule, evidence)
            findings = [one for one in findings if one.code != rule.code] + found
    return _with_findings(result, findings)


def check_ranks(result: Result) -> Result:
    """The result of several ranks, with what only they together show."""
    findings = list(result.findings)
    checked = {one.code: one for one in result.checked}
    # Their steps need not be the same ones.
    evidence = Evidence(confidence="medium", ranks=result.ranks)
    for rule in RULES:
        if rule.needs == "ranks":
            found, checked[rule.code] = _checked(rule, evidence)
            findings.extend(found)
    return replace(_with_findings(result, findings), checked=tuple(checked.values()))


def _with_findings(result: Result, findings: list[Finding]) -> Result:
    ordered = sorted(findings, key=lambda finding: finding.code)
    return replace(result, findings=tuple(ordered))


def recommends_plan(result: Result) -> bool:
    """Does a finding recommend the memory plan that the result has chosen?"""
    codes = {rule.code for rule in RULES if rule.gives_plan}
    return any(finding.code in codes for finding in result.findings)


def _with_digest(finding: Finding, sources: Mapping[str, Source]) -> Finding:
    """The finding, with the digest of the file that its diff changes."""
    fix = finding.fix
    if fix is None or not fix.diff:
        return finding
    file = file_of(fix.diff)
    of_file = (one.digest for site, one in sources.items() if file_of_site(site) == file)
    return replace(finding, fix=replace(fix, digest=next(filter(None, of_file), None)))


def _checked(rule: Rule, evidence: Evidence) -> tuple[list[Finding], Checked]:
    try:
        found = [_with_digest(one, evidence.sources) for one in rule.look(evidence)]
    except NotApplicable as error:
        return [], Checked(rule.code, rule.name, "not-applicable", str(error))
    except Exception as error:
        return [], Checked(rule.code, rule.name, "error", f"{type(error).__name__}: {error}")
    return found, Checked(rule.code, rule.name, "found" if found else "clean")
