"""Findings in words: their places on the page, their lines on a terminal, what ``explain`` says.

In a page of the documentation, links become numbers, and their addresses follow the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from posixpath import normpath
from textwrap import indent
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


_HOME = "https://github.com/recompute-scan/recompute-scan/blob/main/docs/"
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]{1,400})\)")
# How a page came to be is of no use to whom a run has failed.
_BARE = re.compile(r"<(https://[^<>\s]+)>")
_GENERATED = re.compile(r"(?<!\s)\s*Generated: `[^`]*`\.?")


def sheet(markdown: str, *, color: bool, width: int = WIDTH, folder: str = "") -> str:
    """A page of ours as text, ending in a line end, with the addresses of its links last.

    Relative links are from ``folder`` below ``docs``, which ends with a slash.
    """
    links: dict[str, int] = {}
    text = _LINK.sub(lambda link: _link(link, folder, links), _GENERATED.sub("", markdown))
    shown = _rendered(_BARE.sub(r"\1", text), width, color=color)
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    lines += [""] * bool(links) + [f"    [{number}] {target}" for target, number in links.items()]
    return "\n".join(lines) + "\n"


def _rendered(text: str, width: int, *, color: bool) -> str:
    # A training under `run` gets its answer without rich, which may be an old one there.
    from rich.console import Console, ConsoleOptions, RenderResult  # noqa: PLC0415 - see above
    from rich.markdown import CodeBlock, Heading, Markdown, TableElement  # noqa: PLC0415 - see above
    from rich.table import Table  # noqa: PLC0415 - see above
    from rich.text import Text  # noqa: PLC0415 - see above
    from rich.theme import Theme  # noqa: PLC0415 - see above

    class Title(Heading):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield Text(self.text.plain, "bold")

    class Code(CodeBlock):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield Text(indent(str(self.text).rstrip(), "    "), "dim", overflow="ignore")

    class Rows(TableElement):
        """A table without a head: a finding's box has none."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            assert self.header and self.header.row and self.body
            table = Table.grid(padding=(0, 2, 0, 0))
            for row in (self.header.row, *self.body.rows):
                table.add_row("", *(cell.content for cell in row.cells))
            yield table
            yield ""

    class Sheet(Markdown):
        elements = Markdown.elements | {"heading_open": Title, "fence": Code, "table_open": Rows}

    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        theme=Theme({"markdown.code": "cyan"}),
        legacy_windows=False,
    )
    with console.capture() as shown:
        console.print(Sheet(text, hyperlinks=False), crop=False)
    return shown.get()


def in_short(markdown: str) -> str:
    """The title and the box of a finding's page."""
    return "\n\n".join(markdown.split("\n\n")[:2])


def _link(link: re.Match[str], folder: str, links: dict[str, int]) -> str:
    text, target = link[1], link[2]
    # `explain` has the other findings' pages too.
    if target.startswith("#") or re.fullmatch(r"RS\d{3}\.md", target):
        return text
    if not target.startswith("https://"):
        path = normpath(f"{folder}{target}")
        target = f"{_HOME}{path}" if not path.startswith("../") else f"{_HOME[:-5]}{path[3:]}"
    return f"{text} [{links.setdefault(target, len(links) + 1)}]"
