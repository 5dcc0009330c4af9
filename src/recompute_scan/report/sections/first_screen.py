"""The first screen: verdict, headline, three numbers, how sure they are, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recompute_scan.report import summary, words
from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.finding_words import finding_anchors
from recompute_scan.report.page import Page
from recompute_scan.report.plain_count import plain_count_row, plain_count_table
from recompute_scan.report.section import Section, always, analysed
from recompute_scan.result import Result

_VERDICT_COLOUR = {
    "doubled": "red",
    "inconclusive": "yellow",
    "none": "green",
    "partial": "green",
    "full": "green",
}


def _further_reason(result: Result) -> str | None:
    """Why there is no clearer answer, where the headline does not say it already."""
    reason = result.reason
    if reason is None or reason.rstrip(".").casefold() in result.headline.casefold():
        return None
    return reason


def _first_fix(result: Result) -> tuple[str, str] | None:
    """Anchor and summary of the first fix."""
    anchors = finding_anchors(result.findings)
    fixes = ((a, f.fix.summary) for a, f in zip(anchors, result.findings, strict=True) if f.fix)
    return next(fixes, None)


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "level": "h2" if result.crash else "h1",
        "analysed": analysed(result),
        "reason": _further_reason(result),
        "numbers": summary.key_numbers(result),
        "plain": plain_count_row(result),
        "plain_rows": plain_count_table(result),
        "ranks": summary.ranks_sentence(result),
        "fix": _first_fix(result),
    }


def _rows(result: Result, quoted: Callable[[str], str]) -> list[tuple[str, str, str]]:
    """Label, value and note of what is below the three numbers in text and in Markdown.

    ``quoted`` makes harmless what holds names.
    """
    found = []
    if ratio := summary.ratio_row(result):
        found.append(("HFU over MFU", *ratio))
    evidence = f"{result.evidence_level}: {words.EVIDENCE_WORDS[result.evidence_level]}"
    found.append(("Confidence", result.confidence, evidence))
    if plain := plain_count_row(result):
        found.append(("Plain count", plain[0], quoted(plain[1])))
    if len(result.ranks) > 1:
        found.append(("Ranks", str(len(result.ranks)), summary.rank_words(result)))
    return found


def _text(page: Page, result: Result) -> None:
    if not analysed(result):
        page.prose(result.headline, "")
        return
    colour = _VERDICT_COLOUR[result.verdict]
    page.written.append(page.style(f"Verdict: {words.VERDICT_WORDS[result.verdict]}", fg=colour))
    page.prose(result.headline, "", bold=True)
    page.written.append("")
    for number in summary.key_numbers(result):
        how: dict[str, object] = {"fg": "red", "bold": True} if number.alarming else {"bold": True}
        page.row(number.label, number.value, number.note, **how)
    for label, value, note in _rows(result, lambda text: visible(text, 200)):
        page.row(label, value, note, bold=True)
    if result.verdict == "inconclusive":
        page.title("Why, and what to record")
        if result.reason:
            page.prose(result.reason)
        page.prose(words.HOW_TO_RECORD)
    else:
        page.written.append("")
        page.prose(words.VERDICT_MEANING[result.verdict])


def _markdown(result: Result) -> str:
    numbers = [(one.label, one.value, one.note) for one in summary.key_numbers(result)]
    rows = [
        f"| {label} | **{value}** | {note} |"
        for label, value, note in (
            *numbers,
            *_rows(result, lambda text: markdown_prose(text[:200])),
        )
    ]
    parts = [
        f"### Verdict: {words.VERDICT_WORDS[result.verdict]}",
        markdown_prose(result.headline[:1000]),
        "\n".join(["| | | |", "| --- | --- | --- |", *rows]),
    ]
    if result.verdict == "inconclusive":
        parts += [f"Why: {markdown_prose(result.reason)}"] if result.reason else []
        parts.append(words.HOW_TO_RECORD)
    return "\n\n".join(parts)


SECTION = Section(
    anchor="verdict",
    title="Verdict",
    template="first_screen.html",
    present=always,
    html=_html,
    text=_text,
    markdown=_markdown,
    help=(
        "The first screen is the answer.",
        "Checkpointing throws away what the forward pass computed and runs a block once more in "
        "the backward pass. One recompute is its price; every further one is waste.",
    ),
)
