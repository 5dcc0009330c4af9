"""Findings in words: their places on the page, their lines on a terminal, what ``explain`` says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recompute_scan.report import words
from recompute_scan.report.blocks import WIDTH, Page
from recompute_scan.report.summary import diff_lines
from recompute_scan.report.templating import visible
from recompute_scan.result import Finding

UNKNOWN_CAUSE = "This is none of the failures that recompute-scan knows."
# Columns of the labels beside what is said of a fix.
_LABEL = 10
_MOST_EVIDENCE = 3
_DIFF_COLOUR = {"add": "green", "del": "red", "hunk": "cyan"}
_SEVERITY_COLOUR = {"error": "red", "warning": "yellow", "info": "cyan"}


def is_crash_finding(finding: Finding) -> bool:
    """Is this a finding on a failure, rather than on what a trace shows?"""
    return finding.code.startswith(("RS1", "RS2"))


def finding_anchors(findings: Sequence[Finding]) -> list[str]:
    """One anchor a finding: its code, numbered from the second of the same code on."""
    seen: dict[str, int] = {}
    anchors = []
    for finding in findings:
        name = "finding-" + re.sub(r"[^A-Za-z0-9]+", "-", finding.code)[:40]
        seen[name] = seen.get(name, 0) + 1
        anchors.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return anchors


def finding_text(page: Page, finding: Finding) -> None:
    """What was found and how it is repaired, on a terminal."""
    page.title("Finding")
    page.prose(_head(finding), "    ", "  ", fg=_SEVERITY_COLOUR[finding.severity])
    page.prose(finding.title)
    if is_crash_finding(finding):
        _why(page, finding)
    elif finding.fix is None or not finding.fix.diff:
        # a diff names the line, and the call sites say why
        _why(page, finding, _MOST_EVIDENCE)
    fix_text(page, finding)


def fix_text(page: Page, finding: Finding) -> None:
    """How it is repaired and what to look at first, with the diff."""
    fix = finding.fix
    if fix is None:
        return
    _part(page, "Fix", fix.summary, bold=True)
    _part(page, "Keep", fix.keep)
    _part(page, "Remove", fix.remove)
    if not is_crash_finding(finding):
        _part(page, "Risk", words.risk_words(fix))
    if fix.diff:
        page.written.append("")
        for line in diff_lines(fix.diff.rstrip()):
            colour = _DIFF_COLOUR.get(line.kind)
            page.verbatim(line.text, "    ", **({"fg": colour} if colour else {}))


def _part(page: Page, label: str, said: str, **how: object) -> None:
    if said:
        page.prose(said, " " * _LABEL, f"  {label:<{_LABEL - 2}}", **how)


def explanation(
    findings: Sequence[Finding],
    hints: Sequence[Finding],
    first: str | None,
    *,
    color: bool,
    width: int = WIDTH,
) -> str:
    """What ``explain`` prints for a log: the cause, what else it shows, where to read more.

    Args:
        findings: The cause, where it is known.
        hints: What is only worth knowing.
        first: The failure that came first, in one line, or ``None`` where the log has none.
        color: Whether to use ANSI codes.
        width: Columns of the terminal.
    """
    page = Page(color, width)
    if first is None and not findings:
        page.prose("No exception and no timeout was found in this text.", "", bold=True)
    elif not findings:
        page.prose(f"First failure: {visible(first or '', 400)}", "", bold=True)
        page.prose(UNKNOWN_CAUSE, "")
    for finding in findings:
        _explained(page, finding)
    for finding in hints:
        page.title("Also seen; nothing shows that it ended the run")
        _explained(page, finding)
    codes = list(dict.fromkeys(finding.code for finding in (*findings, *hints)))
    if codes:
        page.title("Read more")
        for code in codes:
            page.verbatim(f"recompute-scan explain {code}", "  ")
    return "\n".join(page.written).strip("\n") + "\n"


def _explained(page: Page, finding: Finding) -> None:
    page.prose(_head(finding), "", fg="red" if finding.severity == "error" else "yellow")
    page.prose(finding.title, "", bold=True)
    _why(page, finding)
    if finding.fix is not None:
        _part(page, "Fix", finding.fix.summary, bold=True)


def _head(finding: Finding) -> str:
    return f"{finding.code} {finding.name} ({finding.severity}, {finding.confidence} confidence)"


def _why(page: Page, finding: Finding, most: int | None = None) -> None:
    """Why it happened and what shows it, below the title; ``most`` of the latter."""
    _part(page, "Why", finding.detail)
    shown = finding.evidence[:most]
    if shown:
        page.prose("What shows it:")
    for item in shown:
        page.prose(f"- {visible(item, 400)}", "      ", "    ")
    if left := len(finding.evidence) - len(shown):
        page.prose(f"and {left} more (see the report)", "      ", "    ")
