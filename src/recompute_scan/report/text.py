"""The whole answer as text: in columns for a terminal, and short and inert for an issue tracker.

On a terminal only paths, source lines, commands and diffs may be wider than its columns, since they
are there to be copied. In Markdown nothing from the result can close a fence, start markup, mention
a person or refer to an issue.
"""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.report.commands import fix_is_measurable
from recompute_scan.report.contents import sections_of
from recompute_scan.report.escape import markdown_code as code
from recompute_scan.report.escape import visible
from recompute_scan.report.page import WIDTH, Page
from recompute_scan.result import Result
from recompute_scan.run_info import NextCommand, Purpose

# What is done without an edit, before all else.
_FIRST: dict[Purpose, str] = {
    "measure": "measure the fix",
    "compare-gradients": "compare gradients with and without checkpoints",
}


def render_text(
    result: Result,
    *,
    color: bool,
    report: str | None = None,
    after: Sequence[NextCommand] = (),
    width: int = WIDTH,
    links: bool = False,
) -> str:
    """The summary, ending in a line end.

    ``report`` is the path of the written page. ``after`` are the exact commands that come next.
    With ``color`` the same characters carry ANSI codes; nothing else differs. With ``links`` call
    sites whose files are here are links (OSC 8).
    """
    page = Page(color, width, links)
    for section in sections_of(result):
        section.text(page, result)
    next_steps(page, report, after, result)
    return "\n".join(page.written).rstrip("\n") + "\n"


def next_steps(
    page: Page, report: str | None, after: Sequence[NextCommand], result: Result | None = None
) -> None:
    """Where the page is, and the commands that come next.

    The command that measures is there only where there is a fix that can be measured.
    """
    if report is not None:
        page.title("Report")
        page.verbatim(visible(report, 4096), "  ", underline=True)
    if not after or result is None:
        return
    possible = set(_FIRST) if fix_is_measurable(result) else set(_FIRST) - {"measure"}
    first = [command for command in after if command.purpose in possible]
    then = [command for command in after if command.purpose not in _FIRST]
    for command in first:
        page.title(f"Next: {_FIRST[command.purpose]}; nothing is edited")
        page.verbatim(visible(command.text, 4096), "  ")
    if then:
        what = "apply it" if any(one.fix for one in result.findings) else "make the change"
        page.title(f"{'Then' if first else 'Next'}: {what}, record again and compare")
        for command in then:
            page.verbatim(visible(command.text, 4096), "  ")


def render_markdown(result: Result) -> str:
    """The summary as GitHub-flavoured Markdown, ending in a line end."""
    parts = [section.markdown(result) for section in sections_of(result)]
    parts.append(f"recompute-scan {code(result.tool_version, 20)}")
    return "\n\n".join(part for part in parts if part) + "\n"
