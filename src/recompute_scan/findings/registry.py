"""All rules, in order of their codes, and the one place that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType

from msgspec.structs import replace

from recompute_scan.findings.base import (
    Answer,
    CodeEvidence,
    Evidence,
    NotApplicable,
    RankEvidence,
    Rule,
    RunEvidence,
)
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


def check_all(evidence: Evidence) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    """Findings, and what became of each rule. A rule that breaks never costs the report."""
    return _check_each(lambda rule: rule.look(evidence), evidence.sources)


def check_code(evidence: CodeEvidence) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    """The same where there is no trace: rules on compiled code alone can look."""
    return _check_each(lambda rule: rule.look_at_code(evidence))


def check_run(evidence: RunEvidence) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    """The same where no step was profiled: rules on what the run itself saw can look."""
    return _check_each(lambda rule: rule.look_at_run(evidence), evidence.sources)


def _check_each(
    look: Callable[[Rule], Answer], sources: Mapping[str, Source] = MappingProxyType({})
) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    findings: list[Finding] = []
    checked: list[Checked] = []
    for rule in RULES:
        found, status = _checked(rule, partial(look, rule))
        findings.extend(_with_digest(one, sources) for one in found)
        checked.append(status)
    return tuple(findings), tuple(checked)


def settle(result: Result, gradients: ComparedGradients, sources: Mapping[str, Source]) -> Result:
    """The result, once gradients were compared with those without checkpoints."""
    evidence = RunEvidence(result.fidelity, None, sources, gradients, watched=result.watched)
    findings = list(result.findings)
    for rule in RULES:
        if rule.wrong_gradients and rule.check_run is not None and rule.needs == "comparison":
            found, _ = _checked(rule, partial(rule.look_at_run, evidence))
            found = [_with_digest(one, sources) for one in found]
            findings = [one for one in findings if one.code != rule.code] + found
    ordered = sorted(findings, key=lambda finding: finding.code)
    return replace(result, findings=tuple(ordered))


def check_ranks(result: Result) -> Result:
    """The result of several ranks, with what only they together show."""
    findings = list(result.findings)
    checked = {one.code: one for one in result.checked}
    evidence = RankEvidence(result.ranks)
    for rule in RULES:
        if rule.check_ranks is not None:
            found, checked[rule.code] = _checked(rule, partial(rule.check_ranks, evidence))
            findings.extend(found)
    ordered = sorted(findings, key=lambda finding: finding.code)
    return replace(result, findings=tuple(ordered), checked=tuple(checked.values()))


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


def _checked(rule: Rule, check: Callable[[], Answer]) -> tuple[list[Finding], Checked]:
    try:
        answer = check()
    except Exception as error:
        return [], Checked(rule.code, rule.name, "error", f"{type(error).__name__}: {error}")
    if isinstance(answer, NotApplicable):
        return [], Checked(rule.code, rule.name, "not-applicable", answer.why)
    return answer, Checked(rule.code, rule.name, "found" if answer else "clean")
