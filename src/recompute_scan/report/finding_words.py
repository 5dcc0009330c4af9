"""Findings in words: their places on the page, their lines on a terminal, what ``explain`` says.

A page of the documentation is shown as far as it uses Markdown: headings, paragraphs, lists,
tables, fences, bold, code and links, which keep their address where they lead somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from posixpath import normpath
from typing import Any

from recompute_scan.report import words
from recompute_scan.report.blocks import WIDTH, Page
from recompute_scan.report.summary import diff_lines
from recompute_scan.report.templating import visible
from recompute_scan.result import Finding

UNKNOWN_CAUSE = "recompute-scan does not know this failure."
# Columns of the labels of a fix.
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
    """A finding and its fix, on a terminal."""
    page.title("Finding")
    page.prose(_head(finding), "    ", "  ", fg=_SEVERITY_COLOUR[finding.severity])
    page.prose(finding.title)
    if is_crash_finding(finding):
        _why(page, finding)
    elif finding.fix is None or not finding.fix.diff:
        # a diff names the line, and the call sites say why
        _why(page, finding, _MOST_EVIDENCE)
    fix_text(page, finding)


def fix_text(page: Page, finding: Finding, *, verbose: bool = True) -> None:
    """How it is repaired and what to look at first, with the diff, or, in short, its changes."""
    fix = finding.fix
    if fix is None:
        return
    _part(page, "Fix", fix.summary, bold=True)
    if verbose:
        _part(page, "Keep", fix.keep)
        _part(page, "Remove", fix.remove)
    if not is_crash_finding(finding):
        _part(page, "Risk", words.risk_words(fix))
    if fix.diff:
        page.written.append("")
        for line in diff_lines(fix.diff.rstrip()):
            if not verbose and (line.kind in ("same", "hunk") or line.text.startswith("--- ")):
                continue
            text = line.text if verbose else line.text.removeprefix("+++ b/")
            colour = _DIFF_COLOUR.get(line.kind)
            page.verbatim(text, "    ", **({"fg": colour} if colour else {}))


def _part(page: Page, label: str, said: str, **how: Any) -> None:
    if said:
        page.prose(said, " " * _LABEL, f"  {label:<{_LABEL - 2}}", **how)


def explanation(
    findings: Sequence[Finding],
    hints: Sequence[Finding],
    first: str | None,
    *,
    color: bool,
    width: int = WIDTH,
    verbose: bool = True,
) -> str:
    """The answer of ``explain`` for a log: the cause, other hints, where to read more.

    ``first`` is the failure that came first, in one line; ``None`` where the log has none. Unless
    ``verbose``, the answer has at most 15 lines.
    """
    page = Page(color, width)
    if first is None and not findings:
        page.prose("No exception and no timeout was found in this text.", "", bold=True)
    elif not findings:
        page.prose(f"First failure: {visible(first or '', 400)}", "", bold=True)
        page.prose(UNKNOWN_CAUSE, "")
    codes = list(dict.fromkeys(finding.code for finding in (*findings, *hints)))
    for finding in findings[: None if verbose else 1]:
        _explained(page, finding, verbose=verbose)
    for finding in hints if verbose else ():
        page.title("Also seen; nothing shows that it ended the run")
        _explained(page, finding)
    if codes and not verbose:
        if others := [f"{one.code} {one.name}" for one in (*findings[1:], *hints)]:
            page.cut(f"Also seen (-v): {', '.join(others)}", "  ")
        page.written += ["", f"  more    recompute-scan explain {codes[0]}"]
    elif codes:
        page.title("Read more")
        for code in codes:
            page.verbatim(f"recompute-scan explain {code}", "  ")
    return "\n".join(page.written).strip("\n") + "\n"


def _explained(page: Page, finding: Finding, *, verbose: bool = True) -> None:
    """The cause, its evidence and its fix; in short, in at most 12 lines."""
    most = None if verbose else _MOST_EVIDENCE
    page.prose(_head(finding), "", fg="red" if finding.severity == "error" else "yellow")
    page.prose(finding.title, "", bold=True, most=most and 2)
    if verbose:
        _why(page, finding)
    else:
        _part(page, "Why", finding.detail, most=most)
        for item in finding.evidence[:most]:
            page.cut(f"- {item}", "    ")
    if finding.fix is not None:
        _part(page, "Fix", finding.fix.summary, bold=True, most=most)


def _head(finding: Finding) -> str:
    return f"{finding.code} {finding.name} ({finding.severity}, {finding.confidence} confidence)"


def _why(page: Page, finding: Finding, most: int | None = None) -> None:
    """Why it happened and what shows it, below the title; ``most`` of the latter."""
    _part(page, "Why", finding.detail)
    shown = finding.evidence[:most]
    if shown:
        page.prose("Evidence:")
    for item in shown:
        page.prose(f"- {visible(item, 400)}", "      ", "    ")
    if left := len(finding.evidence) - len(shown):
        page.prose(f"and {left} more (see the report)", "      ", "    ")


_RULE = re.compile(r"[|\s:-]+")
_HOME = "https://github.com/recompute-scan/recompute-scan/blob/main/docs/"
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]{1,400})\)")
_BARE = re.compile(r"<(https://[^<>\s]+)>")
_MARKS = re.compile(r"\*\*|(?<!`)`(?!`)|(?<!\w)\*(?=\w)|(?<=[\w.])\*(?!\w)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
# How a page came to be is of no use to whom a run has failed.
_GENERATED = re.compile(r"(?<!\s)\s*Generated: `[^`]*`\.?")


def sheet(markdown: str, page: Page, *, folder: str = "") -> str:
    """A page of ours as text, ending in a line end.

    The empty ``page`` gives the width and the colour. Relative links are from ``folder`` below
    ``docs``, which ends with a slash.
    """
    for block in _blocks(_GENERATED.sub("", markdown)):
        page.written.append("")
        _write(block, page, folder)
    return "\n".join(page.written).strip("\n") + "\n"


def sheet_in_short(markdown: str, page: Page, *, folder: str = "") -> str:
    """The title and the box of a finding's page: symptom, cost, whether the fix is safe, the fix.

    Arguments as of :func:`sheet`.
    """
    title, box, *_ = _blocks(markdown)
    page.prose(_plain(title[0].lstrip("# "), folder), "", bold=True)
    for row in box:
        if not _RULE.fullmatch(row):
            label, _, said = _plain(row.strip("| "), folder).partition(" | ")
            page.prose(said, " " * _LABEL, f"  {label:<{_LABEL - 2}}", most=3)
    return "\n".join(page.written) + "\n"


def _blocks(markdown: str) -> list[list[str]]:
    """Lines that belong together: a heading, a fence, a paragraph, an item, a row."""
    blocks: list[list[str]] = [[]]
    fenced = False
    for line in markdown.splitlines():
        fence = line.startswith("```")
        alone = not fenced and (line.startswith("#") or (fence and blocks[-1]))
        if (not line.strip() and not fenced) or alone:
            blocks.append([])
        if line.strip() or fenced:
            blocks[-1].append(line)
        if fence:
            fenced = not fenced
        if not fenced and (fence or line.startswith("#")):
            blocks.append([])
    return [block for block in blocks if block]


def _write(block: list[str], page: Page, folder: str) -> None:
    first = block[0]
    if first.startswith("```"):
        for line in block[1:-1]:
            page.verbatim(line, "    ", dim=True)
    elif first.startswith("#"):
        page.prose(_plain(first.lstrip("# "), folder), "", bold=True)
    elif first.startswith("|"):
        for row in block:
            if not _RULE.fullmatch(row):
                cells = [_plain(cell.strip(), folder) for cell in row.strip("|").split(" | ")]
                between = ": " if len(cells) == 2 else "  "
                text = between.join(cell.strip() for cell in cells).replace("?: ", "? ")
                page.prose(text, "      ", "  ")
    else:
        for part in _parts(block):
            item = _ITEM.match(part)
            text = _plain(part, folder)
            page.prose(text, "    " if item else "", "  " if item else "")


def _parts(block: list[str]) -> list[str]:
    """A paragraph as one, a list item by item."""
    parts: list[str] = []
    for line in block:
        if not parts or _ITEM.match(line):
            parts.append(line)
        else:
            parts[-1] += f" {line.strip()}"
    return parts


def _plain(text: str, folder: str) -> str:
    return _MARKS.sub("", _BARE.sub(r"\1", _LINK.sub(lambda link: _link(link, folder), text)))


def _link(link: re.Match[str], folder: str) -> str:
    text, target = link[1], link[2]
    if target.startswith("#"):
        return text
    if re.fullmatch(r"RS\d{3}\.md", target) and text.startswith(target[:5]):
        return text  # `explain` has it too
    if not target.startswith("https://"):
        path = normpath(f"{folder}{target}")
        target = f"{_HOME}{path}" if not path.startswith("../") else f"{_HOME[:-5]}{path[3:]}"
    return f"{text} ({target})"
