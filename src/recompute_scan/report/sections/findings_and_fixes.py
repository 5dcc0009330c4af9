"""Findings and fixes: what to change, as a diff where the line is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report import words
from recompute_scan.report.commands import diff_lines
from recompute_scan.report.escape import markdown_code, markdown_fence, markdown_prose
from recompute_scan.report.finding_words import finding_anchors, finding_text, is_crash_finding
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.result import Finding, Result


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "anchors": finding_anchors(result.findings),
        "is_crash_finding": is_crash_finding,
        "diff_lines": diff_lines,
    }


def _text(page: Page, result: Result) -> None:
    for finding in result.findings:
        # those on a failure are below it already
        if result.crash is None or not is_crash_finding(finding):
            finding_text(page, finding)


def _markdown(result: Result) -> str:
    return "\n\n".join(map(_finding_markdown, result.findings))


def _finding_markdown(finding: Finding) -> str:
    written = [
        f"#### {markdown_code(finding.code, 40)} {markdown_prose(finding.title[:300])}",
        f"{markdown_code(finding.name, 60)}, {finding.severity}, {finding.confidence} confidence. "
        f"{markdown_prose(finding.detail[:2000])}",
    ]
    if finding.evidence:
        written.append("\n".join(f"- {markdown_prose(item[:600])}" for item in finding.evidence))
    if finding.fix is not None:
        fix = finding.fix
        written.append(f"**Fix:** {markdown_prose(fix.summary[:400])}")
        written.append(f"Risk: {markdown_prose(words.risk_words(fix)[:400])}")
        if fix.diff:
            written.append(markdown_fence(fix.diff, "diff"))
    return "\n\n".join(written)


SECTION = Section(
    anchor="findings",
    title="Findings and fixes",
    template="findings_and_fixes.html",
    present=lambda result: bool(result.findings),
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Findings",
    help=(
        "Findings",
        "say what to change, as a diff where the line is known. `safe` cannot change results; "
        "`review` says why to look first.",
    ),
)
