"""The answer as a person, a program or a CI service reads it. Names in it are hostile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from recompute_scan.check.policy import Refusal, Ruling, Site, fingerprint
from recompute_scan.files import document
from recompute_scan.report.templating import visible
from recompute_scan.result import Result
from recompute_scan.terminal import inert
from recompute_scan.units import rounded

HOME = "https://github.com/recompute-scan/recompute-scan"
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_LONGEST = 1000
_REFUSED_BY = "--fail-on wrong-gradients refuses it"
_NO_XML = {0xFFFE: "\\ufffe", 0xFFFF: "\\uffff"}


def text(outcome: Ruling) -> str:
    """For a person. Every line begins with a word of ours: a CI service reads some beginnings."""
    lines = []
    for title, refusals in (("refused", outcome.refused), ("accepted", outcome.accepted)):
        for refusal in refusals:
            where = f" at {_shown(refusal.site)}" if refusal.site else ""
            lines.append(f"{title}: {refusal.rule}{where}: {line(refusal.why)}")
            fix = refusal.finding.fix if refusal.finding else None
            if fix and title == "refused":
                lines.append(f"  fix: {line(fix.summary)}")
    lines += [f"undecided: {line(doubt)}" for doubt in outcome.undecided]
    lines += [
        f"not refused: {finding.code}: {line(finding.title)}; {_REFUSED_BY}"
        for finding in outcome.passed_over
    ]
    return "\n".join([*lines, _closing(outcome)]) + "\n"


def as_json(outcome: Ruling) -> str:
    """For a program: ``recompute-scan-check/1``."""
    result = outcome.result
    fields = {
        "schema": "recompute-scan-check/1",
        "tool_version": result.tool_version,
        "outcome": outcome.word,
        "status": outcome.status,
        "verdict": result.verdict,
        "recompute_per_backward": result.recompute_per_backward,
        "saving_pct": result.cost.saving_pct if result.cost else None,
        "refused": [_plain(refusal, result) for refusal in outcome.refused],
        "accepted": [_plain(refusal, result) for refusal in outcome.accepted],
        "undecided": list(outcome.undecided),
    }
    return json_text(fields)


def github(outcome: Ruling) -> str:
    """Workflow commands of GitHub Actions: an annotation for each refusal, at its call site.

    https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
    """
    lines = [
        command("error", refusal.why, refusal.site, title=f"recompute-scan {refusal.rule}")
        for refusal in outcome.refused
    ]
    lines += [
        command("warning", doubt, None, title="recompute-scan has no verdict")
        for doubt in outcome.undecided
    ]
    lines += [
        command("warning", f"{one.title}; {_REFUSED_BY}", None, title=f"recompute-scan {one.code}")
        for one in outcome.passed_over
    ]
    return "\n".join([*lines, _closing(outcome)]) + "\n"


def sarif(outcome: Ruling) -> str:
    """SARIF 2.1.0, for code scanning.

    https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
    """
    result = outcome.result
    rules = {rule.code: rule.name for rule in result.checked}
    rules |= {finding.code: finding.name for finding in result.findings}
    for refusal in (*outcome.refused, *outcome.accepted):
        rules.setdefault(refusal.rule, refusal.rule)
    numbers = {code: number for number, code in enumerate(rules)}
    results = [
        _sarif_result(refusal, result, numbers, accepted=refusals is outcome.accepted)
        for refusals in (outcome.refused, outcome.accepted)
        for refusal in refusals
    ]
    return sarif_document(
        rules,
        results,
        result.tool_version,
        outcome.undecided,
        outcome.status,
        complete=not outcome.undecided,
    )


def sarif_document(
    rules: Mapping[str, str],
    results: Sequence[Mapping[str, Any]],
    version: str,
    doubts: Sequence[str],
    status: int,
    *,
    complete: bool,
) -> str:
    """One run in SARIF: rules by code with their names, and what they found."""
    fields = {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "recompute-scan",
                        "version": version,
                        "informationUri": HOME,
                        "rules": [
                            {"id": code, "name": name, "helpUri": f"{HOME}/tree/main/docs/findings"}
                            for code, name in rules.items()
                        ],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": complete,
                        "exitCode": status,
                        "toolExecutionNotifications": [
                            {"level": "warning", "message": {"text": inert(doubt)}}
                            for doubt in doubts
                        ],
                    }
                ],
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }
    return json_text(fields)


def json_text(fields: Mapping[str, Any]) -> str:
    """A JSON document, two spaces a level."""
    return document(fields).decode()


def junit(outcome: Ruling) -> str:
    """A JUnit report: one test a rule, and one for each threshold that was passed."""
    result = outcome.result
    names = {rule.code: f"{rule.code} {rule.name}" for rule in result.checked}
    for refusal in (*outcome.refused, *outcome.accepted):
        names.setdefault(refusal.rule, refusal.rule)
    verdict = [doubt for doubt in outcome.undecided if result.verdict == "inconclusive"][:1]
    undecided = [part("error", doubt, type="undecided") for doubt in verdict]
    cases = {"verdict": undecided, **{name: [] for name in names.values()}}
    for refusal in outcome.refused:
        failure = part("failure", refusal.why, type=refusal.rule)
        failure.text = "\n".join(_explained(refusal))
        cases[names[refusal.rule]].append(failure)
    for rule in result.checked:
        if rule.status in ("error", "not-applicable"):
            kind = "error" if rule.status == "error" else "skipped"
            cases[names[rule.code]].append(part(kind, rule.why or ""))
    return junit_document("recompute-scan", "recompute_scan", cases)


def part(kind: str, why: str, **more: str) -> ElementTree.Element:
    """One thing that is wrong in a JUnit case, or why it was skipped."""
    return ElementTree.Element(kind, {**more, "message": line(why)})


def junit_document(
    name: str, class_name: str, cases: Mapping[str, Sequence[ElementTree.Element]]
) -> str:
    """A JUnit report of these cases, by name."""
    kinds = [{one.tag for one in parts} for parts in cases.values()]
    counted = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    numbers = {word: str(sum(kind in one for one in kinds)) for word, kind in counted.items()}
    suites = ElementTree.Element("testsuites")
    given = {"name": name, "tests": str(len(cases)), **numbers}
    suite = ElementTree.SubElement(suites, "testsuite", given)
    for title, parts in cases.items():
        case = ElementTree.SubElement(suite, "testcase", classname=class_name, name=title)
        case.extend(parts)
    for element in suite.iter():
        element.attrib = {key: _xml(value) for key, value in element.attrib.items()}
        element.text = _xml(element.text) if element.text else element.text
    ElementTree.indent(suites)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        + ElementTree.tostring(suites, encoding="unicode")
        + "\n"
    )


def _xml(text: str) -> str:
    """The characters that a document may hold: https://www.w3.org/TR/xml/#charsets."""
    return inert(text, keep="\n\t").translate(_NO_XML)


RENDERINGS: dict[str, Callable[[Ruling], str]] = {
    "text": text,
    "json": as_json,
    "github": github,
    "sarif": sarif,
    "junit": junit,
}


def _closing(outcome: Ruling) -> str:
    result = outcome.result
    numbers = [f"verdict {result.verdict}"]
    if result.recompute_per_backward is not None:
        runs = result.recompute_per_backward
        numbers.append(f"{runs:g} {'recompute' if runs == 1 else 'recomputes'} per backward")
    if result.cost is not None and result.verdict != "inconclusive":
        wasted = rounded(result.cost.saving_pct, result.cost.saving_is_rough)
        numbers.append(f"{wasted} of the step is wasted")
    counted = ", ".join(
        f"{len(found)} {word}"
        for found, word in ((outcome.refused, "refused"), (outcome.accepted, "accepted"))
        if found
    )
    return f"recompute-scan check: {counted or outcome.word} ({', '.join(numbers)})"


def _explained(refusal: Refusal) -> Iterator[str]:
    if refusal.site is not None:
        yield f"at {_shown(refusal.site)}"
    if refusal.finding is not None:
        yield line(refusal.finding.detail)
        for evidence in refusal.finding.evidence:
            yield f"- {line(evidence)}"
        if refusal.finding.fix is not None:
            yield f"fix: {line(refusal.finding.fix.summary)}"


def _plain(refusal: Refusal, result: Result) -> dict[str, Any]:
    finding = refusal.finding
    return {
        "rule": refusal.rule,
        "why": inert(refusal.why),
        "file": inert(refusal.site.file) if refusal.site else None,
        "line": refusal.site.line if refusal.site else None,
        "fingerprint": fingerprint(finding, result) if finding else None,
        "fix": inert(finding.fix.summary) if finding and finding.fix else None,
        "saving_pct": finding.saving_pct if finding else None,
    }


def _sarif_result(
    refusal: Refusal, result: Result, numbers: dict[str, int], *, accepted: bool
) -> dict[str, Any]:
    finding = refusal.finding
    message = [refusal.why, *([finding.fix.summary] if finding and finding.fix else [])]
    found: dict[str, Any] = {
        "ruleId": refusal.rule,
        "ruleIndex": numbers[refusal.rule],
        "level": LEVELS[finding.severity] if finding else "error",
        "message": {"text": "\n".join(map(line, message))},
    }
    if refusal.site is not None:
        found["locations"] = [location(refusal.site)]
    if finding is not None:
        found["partialFingerprints"] = {"recomputeScan/v1": fingerprint(finding, result)}
    if accepted:
        found["suppressions"] = [{"kind": "external", "justification": "in the baseline"}]
    return found


def location(site: Site) -> dict[str, Any]:
    """A line of a file in SARIF."""
    try:
        uri = quote(site.file.replace(os.sep, "/"), errors="surrogateescape")
    except UnicodeEncodeError:  # of a trace: no name of a file
        uri = quote(site.file, errors="replace")
    relative = not uri.startswith("/")
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": uri, "uriBaseId": "%SRCROOT%"}
            if relative
            else {"uri": f"file://{uri}"},
            "region": {"startLine": site.line},
        }
    }


def command(kind: str, message: str, site: Site | None, *, title: str) -> str:
    """One workflow command of GitHub Actions."""
    fields = {"file": inert(site.file), "line": str(site.line)} if site else {}
    fields["title"] = title
    given = ",".join(f"{name}={_property(value)}" for name, value in fields.items())
    return f"::{kind} {given}::{_data(line(message))}"


def _data(value: str) -> str:
    # `##[` begins a command of GitHub's runner wherever it is in a line.
    value = value.replace("##[", "## [")
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")


def _shown(site: Site) -> str:
    return f"{visible(site.file).replace('##[', '## [')}:{site.line}"


def line(value: str) -> str:
    """On one line, inert, and begun by no command of GitHub's runner."""
    return visible(value, _LONGEST).replace("##[", "## [")
