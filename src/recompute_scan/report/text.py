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


def render_text(
    result: Result,
    *,
    color: bool,
    report: str | None = None,
    after: Sequence[str] = (),
    width: int = WIDTH,
    links: bool = False,
) -> str:
    """The summary, ending in a line end.

    ``report`` is the path of the written page. ``after`` are the exact commands that come next:
    what measures the fix, if that can be done, what records again, what compares.
    With ``color`` the same characters carry ANSI codes; nothing else differs. With ``links`` call
    sites whose files are here are links (OSC 8).
    """
    page = Page(color, width, links)
    for section in sections_of(result):
        section.text(page, result)
    next_steps(page, report, after, result)
    return "\n".join(page.written).rstrip("\n") + "\n"


def next_steps(
    page: Page, report: str | None, after: Sequence[str], result: Result | None = None
) -> None:
    """Where the page is, and the commands that come next.

    The command that measures is there only where there is a fix that can be measured.
    """
    if report is not None:
        page.title("Report")
        page.verbatim(visible(report, 4096), "  ", underline=True)
    if not after or result is None:
        return
    measured, then = (after[:1], after[1:]) if len(after) != 2 else ((), after)
    for command in measured:
        gradients = "--without-checkpointing" in command
        if not gradients and not fix_is_measurable(result):
            measured = ()
            continue
        what = "compare gradients with and without checkpoints" if gradients else "measure the fix"
        page.title(f"Next: {what}; nothing is edited")
        page.verbatim(visible(command, 4096), "  ")
    if then:
        what = "apply it" if any(one.fix for one in result.findings) else "make the change"
        page.title(f"{'Then' if measured else 'Next'}: {what}, record again and compare")
        for command in then:
            page.verbatim(visible(command, 4096), "  ")


def render_markdown(result: Result) -> str:
    """The summary as GitHub-flavoured Markdown, ending in a line end."""
    parts = [section.markdown(result) for section in sections_of(result)]
    parts.append(f"recompute-scan {code(result.tool_version, 20)}")
    return "\n\n".join(part for part in parts if part) + "\n"
