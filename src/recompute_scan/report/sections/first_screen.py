"""The first screen: verdict, headline, three numbers, how sure they are, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from recompute_scan.report import summary, words
from recompute_scan.report.commands import DiffLine, diff_lines, how_to_record
from recompute_scan.report.escape import markdown_fence, markdown_prose, visible
from recompute_scan.report.finding_words import finding_anchors
from recompute_scan.report.page import Page
from recompute_scan.report.picture import picture
from recompute_scan.report.section import Section, always, analysed, of_memory_alone
from recompute_scan.report.words import plain_count_row, plain_count_table
from recompute_scan.result import Fix, Result

# Lines of the diff on the first screen.
_MOST_DIFF = 14
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


class _Cure(Struct, frozen=True):
    """The first fix: where it is on the page, and the first lines of its diff."""

    anchor: str
    fix: Fix
    diff: tuple[DiffLine, ...]
    cut: bool


def _cure(result: Result) -> _Cure | None:
    anchors = finding_anchors(result.findings)
    for anchor, finding in zip(anchors, result.findings, strict=True):
        if finding.fix is not None and result.crash is None:
            shown = _shown_diff(finding.fix.diff)
            return _Cure(
                anchor, finding.fix, tuple(shown[:_MOST_DIFF]), cut=len(shown) > _MOST_DIFF
            )
    return None


def _shown_diff(diff: str | None) -> list[DiffLine]:
    """Without what names the files, which the summary does, and without blank lines."""
    return [one for one in diff_lines(diff or "") if one.kind != "file" and one.text.strip()]


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "level": "h2" if result.crash or result.plan else "h1",
        "analysed": analysed(result),
        "memory_alone": of_memory_alone(result),
        "reason": _further_reason(result),
        "numbers": summary.key_numbers(result),
        "plain": plain_count_row(result),
        "plain_rows": plain_count_table(result),
        "ranks": summary.ranks_sentence(result),
        # of a run that failed, the section on the failure says it, of a plan, the plan's
        "measured": () if result.crash or result.plan else summary.what_was_measured(result),
        "meaning": words.all_true(result, words.MEANING),
        "record": how_to_record(result),
        "fix_sentence": summary.fix_sentence(result),
        "picture": picture(result) if result.crash is None else None,
        "cure": _cure(result),
        "attention": summary.attention_sentence(result),
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
        record = how_to_record(result)
        page.prose(record.why)
        page.verbatim(visible(record.command, 500), "    ")
    else:
        page.written.append("")
        page.prose(words.all_true(result, words.MEANING))


def _markdown(result: Result) -> str:
    if of_memory_alone(result):
        return f"### {markdown_prose(result.headline[:1000])}"
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
        record = how_to_record(result)
        parts += [record.why, markdown_fence(record.command, "console")]
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
