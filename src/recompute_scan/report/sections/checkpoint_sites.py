"""Checkpoint call sites: the lines of the script that switched checkpointing on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report import words
from recompute_scan.report.escape import markdown_code, markdown_prose, visible
from recompute_scan.report.groups import checkpoint_stacks
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section, analysed
from recompute_scan.result import Checkpoint, Result

_TITLE = "Checkpoint call sites"
# A statement is shown on one line of a terminal, which ends so many columns before its edge.
_MARGIN = 12
_MOST_TEXT = 3
_MOST_MARKDOWN = 6


def _html(result: Result) -> Mapping[str, Any]:
    return {"stacks": checkpoint_stacks(result.regions)}


def _text(page: Page, result: Result) -> None:
    stacks = checkpoint_stacks(result.regions)
    if not stacks:
        return
    page.title(f"{_TITLE}, outer to inner")
    for stack in stacks[:_MOST_TEXT]:
        page.prose(f"{visible(stack.label, 60)}:")
        for number, checkpoint in enumerate(stack.checkpoints, start=1):
            _checkpoint_text(page, number, checkpoint)
    if len(stacks) > _MOST_TEXT:
        page.prose(f"and {len(stacks) - _MOST_TEXT} more arrangements (see the report)")


def _checkpoint_text(page: Page, number: int, checkpoint: Checkpoint) -> None:
    mechanism = visible(words.mechanism_words(checkpoint), 60)
    page.prose(f"{number}. {words.variant_words(checkpoint)}: {mechanism}", "     ", "  ")
    if not checkpoint.call_site:
        return
    page.place(checkpoint.call_site, "     ", fg="cyan")
    if source := words.one_line(checkpoint.source):
        longest = page.width - _MARGIN
        cut = source if len(source) <= longest else source[:longest] + "…"
        page.verbatim(visible(cut, 200), "       ", dim=True)


def _markdown(result: Result) -> str:
    stacks = checkpoint_stacks(result.regions)
    if not stacks:
        return ""
    written = [f"#### {_TITLE}, outer to inner"]
    for stack in stacks[:_MOST_MARKDOWN]:
        items = [
            f"{number}. {_checkpoint_markdown(checkpoint)}"
            for number, checkpoint in enumerate(stack.checkpoints, start=1)
        ]
        written.append("\n".join([f"Blocks {markdown_code(stack.label, 80)}:", "", *items]))
    return "\n\n".join(written)


def _checkpoint_markdown(checkpoint: Checkpoint) -> str:
    mechanism = markdown_prose(words.mechanism_words(checkpoint)[:200])
    text = f"{words.variant_words(checkpoint)}: {mechanism}"
    if checkpoint.call_site:
        text += f", {markdown_code(checkpoint.call_site)}"
    if checkpoint.source:
        text += f": {markdown_code(words.one_line(checkpoint.source), 200)}"
    return text


def _present(result: Result) -> bool:
    named = any(region.checkpoints for region in result.regions)
    return analysed(result) and (named or words.by_checkpoints(result))


SECTION = Section(
    anchor="who",
    title=_TITLE,
    template="checkpoint_sites.html",
    present=_present,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Call sites",
    help=(
        _TITLE,
        "name the lines of the script that switched checkpointing on, outermost first.",
    ),
)
