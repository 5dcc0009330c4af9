"""What a section of the report is: where it is on the page, and what each rendering shows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from recompute_scan.report.blocks import Page
from recompute_scan.result import Result


def analysed(result: Result) -> bool:
    """Whether steps were recorded: a run may fail before its first one, or only compare one."""
    if of_memory_alone(result):
        return False
    return bool(result.steps) or (result.crash is None and result.fidelity is None)


def of_memory_alone(result: Result) -> bool:
    """Whether there is nothing but memory snapshots, which hold no operators."""
    return bool(result.snapshots) and not result.steps and not result.ranks and not result.crash


def always(_result: Result) -> bool:
    """Whatever the result: such a section says itself what is not known."""
    return True


def _no_values(_result: Result) -> Mapping[str, Any]:
    return {}


def _no_lines(_page: Page, _result: Result) -> None:
    return


def _no_markdown(_result: Result) -> str:
    return ""


class Section(Struct, frozen=True):
    """One section; the page, the terminal and Markdown each ask it for their part.

    Attributes:
        anchor: Its ``id`` on the page. Links to it are passed on, so that it never changes.
        title: Its heading on the page, or what gives it for a result.
        template: The file beside its module that shows it on the page.
        present: Whether a result has this section; asked for every rendering.
        html: What the template shows beside ``result``, ``heading``, ``attachments``, ``words`` and
            ``units``, which every section's template has.
        text: Writes its lines for a terminal; none unless given.
        markdown: Its part of the Markdown; empty for nothing.
        link: What the page's navigation calls it; without one it is not listed there.
        help: The line about it under "How to read this page": its name there, and what it says.
    """

    anchor: str
    title: str | Callable[[Result], str]
    template: str
    present: Callable[[Result], bool] = analysed
    html: Callable[[Result], Mapping[str, Any]] = _no_values
    text: Callable[[Page, Result], None] = _no_lines
    markdown: Callable[[Result], str] = _no_markdown
    link: str | None = None
    help: tuple[str, str] | None = None

    def heading(self, result: Result) -> str:
        """The title for this result."""
        return self.title if isinstance(self.title, str) else self.title(result)
