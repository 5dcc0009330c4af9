"""The summary for a terminal: the whole answer in 80 columns, with or without colour.

Only paths, source lines, commands and diffs may be wider, since they are there to be copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan import units
from recompute_scan.report import summary, words
from recompute_scan.report.escape import lines, visible
from recompute_scan.report.failed import failure_text, is_crash_finding, known_failure_text
from recompute_scan.report.groups import block_groups, checkpoint_stacks
from recompute_scan.report.measured import (
    measured_sentences,
    measured_table,
    measured_title,
    removed_words,
)
from recompute_scan.report.page import Page
from recompute_scan.report.plain_count import plain_count_row
from recompute_scan.report.rank_groups import rank_words
from recompute_scan.report.spread import step_time_sentences
from recompute_scan.report.utilization import (
    HTA_COLUMNS,
    HTA_SAYS,
    hta_rows,
    hta_title,
    ratio_row,
)
from recompute_scan.result import Finding, Result

# A statement is shown on one line, which ends here.
_LONGEST_SOURCE = 68
_MOST_GROUPS = 8
_MOST_STACKS = 3
_MOST_COLUMNS = 3
# A table's first column; two of 16 stand beside it.
_WIDEST_LABEL = 46

_VERDICT_COLOUR = {
    "doubled": "red",
    "inconclusive": "yellow",
    "none": "green",
    "partial": "green",
    "full": "green",
}
_SEVERITY_COLOUR = {"error": "red", "warning": "yellow", "info": "cyan"}


def render_text(
    result: Result, *, color: bool, report: str | None = None, after: Sequence[str] = ()
) -> str:
    """The summary, ending in a line end.

    ``report`` is the path of the written page. ``after`` are the exact commands that come next:
    what measures the fix, if that can be done, what records again, what compares.
    With ``color`` the same characters carry ANSI codes; nothing else differs.
    """
    page = Page(color)
    failure_text(page, result)
    early = [f for f in result.findings if result.crash is not None and is_crash_finding(f)]
    for finding in early:
        _finding(page, finding)
    if result.crash is not None:
        page.written.append("")
    if result.crash is not None and not result.steps:
        page.prose(result.headline, "")
    else:
        _verdict(page, result)
    _measured(page, result)
    _cost(page, result)
    _blocks(page, result)
    _who(page, result)
    for finding in result.findings:
        if finding not in early:
            _finding(page, finding)
    _hta(page, result)
    _worth_knowing(page, result)
    _next(page, report, after)
    return "\n".join(page.written).rstrip("\n") + "\n"


def _verdict(page: Page, result: Result) -> None:
    colour = _VERDICT_COLOUR[result.verdict]
    page.written.append(page.style(f"Verdict: {words.VERDICT_WORDS[result.verdict]}", fg=colour))
    page.prose(result.headline, "", bold=True)
    page.written.append("")
    for number in summary.key_numbers(result):
        how: dict[str, object] = {"fg": "red", "bold": True} if number.alarming else {"bold": True}
        page.row(number.label, number.value, number.note, **how)
    if ratio := ratio_row(result):
        page.row("HFU over MFU", *ratio, bold=True)
    evidence = f"{result.evidence_level}: {words.EVIDENCE_WORDS[result.evidence_level]}"
    page.row("Confidence", result.confidence, evidence, bold=True)
    if plain := plain_count_row(result):
        page.row("Plain count", plain[0], visible(plain[1], 200), bold=True)
    if len(result.ranks) > 1:
        page.row("Ranks", str(len(result.ranks)), rank_words(result), bold=True)
    if result.verdict == "inconclusive":
        page.title("Why, and what to record")
        if result.reason:
            page.prose(result.reason)
        page.prose(words.HOW_TO_RECORD)
    else:
        page.written.append("")
        page.prose(words.VERDICT_MEANING[result.verdict])


def _measured(page: Page, result: Result) -> None:
    table = measured_table(result)
    if table is None or result.verified is None:
        return
    page.title(measured_title(result))
    opening, *others = measured_sentences(result)
    page.prose(opening)
    for removed in result.verified.removed:
        page.prose(f"Taken out: {visible(removed_words(removed), 300)}", "    ", "  ")
    page.written.append("")
    lines_of_table = [("", table.columns), *table.rows]
    for first in range(0, len(table.columns), _MOST_COLUMNS):
        for label, cells in lines_of_table:
            shown = cells[first : first + _MOST_COLUMNS]
            page.written.append(f"  {label:<24}" + "".join(f"{cell:>18}" for cell in shown))
        page.written.append("")
    for sentence in others:
        page.prose(sentence)


def _cost(page: Page, result: Result) -> None:
    waste = summary.waste_sentences(result)
    step = summary.step_after(result)
    if step is None or step.measured:  # what was measured has a table of its own
        return
    page.title("Cost" if waste else "Step time")
    for sentence in [*waste, *step_time_sentences(result)]:
        page.prose(sentence)


def _blocks(page: Page, result: Result) -> None:
    groups = block_groups(result.regions)
    if not groups:
        return
    page.title("Blocks")
    for group in groups[:_MOST_GROUPS]:
        recomputes = group.first.recompute_runs_per_backward
        each = " each" if len(group.regions) > 1 else ""
        kind = f" ({visible(group.first.module_class, 30)})" if group.first.module_class else ""
        redundant = (
            f", {units.ms(group.redundant_ms)} redundant per step" if recomputes >= 1.005 else ""
        )
        text = f"{units.times(recomputes)} recomputes{each}{redundant}"
        page.prose(
            f"{visible(group.label, 60)}{kind}: {text}",
            "    ",
            "  ",
            **({"fg": "red"} if recomputes >= 1.005 else {}),
        )
    if len(groups) > _MOST_GROUPS:
        page.prose(f"and {len(groups) - _MOST_GROUPS} more kinds of block (see the report)")


def _who(page: Page, result: Result) -> None:
    stacks = checkpoint_stacks(result.regions)
    if not stacks:
        return
    page.title("Checkpoint call sites, outer to inner")
    for stack in stacks[:_MOST_STACKS]:
        page.prose(f"{visible(stack.label, 60)}:")
        for number, checkpoint in enumerate(stack.checkpoints, start=1):
            variant = words.variant_words(checkpoint)
            mechanism = visible(words.mechanism_words(checkpoint), 60)
            page.prose(f"{number}. {variant}: {mechanism}", "     ", "  ")
            if checkpoint.call_site:
                page.verbatim(visible(checkpoint.call_site, 200), "     ", fg="cyan")
                source = words.one_line(checkpoint.source)
                if source:
                    cut = (
                        source if len(source) <= _LONGEST_SOURCE else source[:_LONGEST_SOURCE] + "…"
                    )
                    page.verbatim(visible(cut, 200), "       ", dim=True)
    if len(stacks) > _MOST_STACKS:
        page.prose(f"and {len(stacks) - _MOST_STACKS} more arrangements (see the report)")


def _finding(page: Page, finding: Finding) -> None:
    page.title("Finding")
    head = f"{finding.code} {finding.name} ({finding.severity}, {finding.confidence} confidence)"
    page.prose(head, "    ", "  ", fg=_SEVERITY_COLOUR[finding.severity])
    page.prose(finding.title)
    if is_crash_finding(finding):
        known_failure_text(page, finding)
    if finding.fix is None:
        return
    risk = words.risk_words(finding.fix)
    page.prose(f"Fix: {finding.fix.summary}", "       ", "  ", bold=True)
    if finding.fix.keep:
        page.prose(f"Keep:   {finding.fix.keep}", " " * 15, " " * 7)
    if finding.fix.remove:
        page.prose(f"Remove: {finding.fix.remove}", " " * 15, " " * 7)
    if not is_crash_finding(finding):
        page.prose(f"Risk:   {risk}", " " * 15, " " * 7)
    if finding.fix.diff:
        page.written.append("")
        for line in lines(finding.fix.diff.rstrip("\n")):
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            page.verbatim(line, "    ", **({"fg": colour} if colour else {}))


def _hta(page: Page, result: Result) -> None:
    if result.hta is None:
        return
    page.title(hta_title(result))
    page.prose(HTA_SAYS)
    page.written.append("")
    for label, *values in [("", *HTA_COLUMNS), *hta_rows(result.hta)]:
        line = f"  {label[:_WIDEST_LABEL]:<{_WIDEST_LABEL}}" + "".join(f"{v:>16}" for v in values)
        page.written.append(line.rstrip())


def _worth_knowing(page: Page, result: Result) -> None:
    notes = list(result.warnings)
    notes += [
        f"{rule.code} could not be checked: {rule.why or 'no reason given'}"
        for rule in result.checked
        if rule.status == "error"
    ]
    if not notes:
        return
    page.title("Worth knowing")
    for note in notes[:10]:
        page.prose(f"- {visible(note, 300)}", "    ", "  ")
    if len(notes) > 10:
        page.prose(f"and {len(notes) - 10} more (see the report)")


def _next(page: Page, report: str | None, after: Sequence[str]) -> None:
    if report is not None:
        page.title("Report")
        page.verbatim(visible(report, 4096), "  ", underline=True)
    if after:
        *measured, again, compared = after
        for command in measured:
            page.title("Next: measure the fix; nothing is edited")
            page.verbatim(visible(command, 4096), "  ")
        page.title(f"{'Then' if measured else 'Next'}: apply it, record again and compare")
        page.verbatim(visible(again, 4096), "  ")
        page.verbatim(visible(compared, 4096), "  ")
