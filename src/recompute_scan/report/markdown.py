"""The result for an issue tracker: short, complete, and inert whatever the names hold.

Nothing from the result can close a fence, start markup, mention a person or refer to an issue.
"""

from __future__ import annotations

from recompute_scan import units
from recompute_scan.report import failed, summary, words
from recompute_scan.report.escape import markdown_code as code
from recompute_scan.report.escape import markdown_fence as fence
from recompute_scan.report.escape import markdown_prose as prose
from recompute_scan.report.groups import block_groups, checkpoint_stacks
from recompute_scan.report.measured import (
    measured_sentences,
    measured_table,
    measured_title,
    removed_words,
)
from recompute_scan.report.plain_count import plain_count_row
from recompute_scan.report.rank_groups import rank_words
from recompute_scan.report.spread import step_time_sentences
from recompute_scan.report.utilization import (
    HTA_COLUMNS,
    HTA_SAYS,
    hta_rows,
    hta_title,
    memory_sentences,
    ratio_row,
)
from recompute_scan.result import Checkpoint, Finding, Result

_MOST_GROUPS = 12
_MOST_STACKS = 6
_MOST_RANKS = 16
# Versions and settings that decide how a case is read; the rest stays in the report.
_MOST_ENVIRONMENT = 12


def render_markdown(result: Result) -> str:
    """The summary as GitHub-flavoured Markdown, ending in a line end."""
    parts = [
        *_failure(result),
        f"### Verdict: {words.VERDICT_WORDS[result.verdict]}",
        prose(result.headline[:1000]),
        _numbers(result),
    ]
    if result.verdict == "inconclusive":
        parts += [f"Why: {prose(result.reason)}"] if result.reason else []
        parts.append(words.HOW_TO_RECORD)
    parts.append(_measured(result))
    parts += [_cost(result), _blocks(result), _who(result)]
    parts.append(prose(" ".join(memory_sentences(result.memory))) if result.memory else "")
    parts += [_finding(finding) for finding in result.findings]
    parts += [_hta(result), _warnings(result), _environment(result)]
    parts.append(f"recompute-scan {code(result.tool_version, 20)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _failure(result: Result) -> list[str]:
    crash = result.crash
    if crash is None:
        return []
    written = [f"### Run: {failed.KIND_WORDS[crash.kind]}", prose(crash.headline[:1000])]
    if len(crash.ranks) > 1:
        ends = crash.ranks[:_MOST_RANKS]
        written.append("\n".join(f"- {prose(failed.rank_words(end))}" for end in ends))
    first = failed.first_end(crash)
    if first is not None:
        state = failed.state_words(first)
        written.append("\n".join(f"- {prose(label)}: {prose(value)}" for label, value in state))
    if crash.traceback:
        written.append(fence("\n".join(failed.traceback_lines(crash)), "text"))
    return written


def _numbers(result: Result) -> str:
    rows = [
        f"| {number.label} | **{number.value}** | {number.note} |"
        for number in summary.key_numbers(result)
    ]
    if ratio := ratio_row(result):
        rows.append(f"| HFU over MFU | **{ratio[0]}** | {ratio[1]} |")
    evidence = f"{result.evidence_level}: {words.EVIDENCE_WORDS[result.evidence_level]}"
    rows.append(f"| Confidence | **{result.confidence}** | {evidence} |")
    if plain := plain_count_row(result):
        rows.append(f"| Plain count | **{plain[0]}** | {prose(plain[1][:200])} |")
    if len(result.ranks) > 1:
        rows.append(f"| Ranks | **{len(result.ranks)}** | {rank_words(result)} |")
    return "\n".join(["| | | |", "| --- | --- | --- |", *rows])


def _measured(result: Result) -> str:
    table = measured_table(result)
    if table is None or result.verified is None:
        return ""
    first, *others = measured_sentences(result)
    rows = [f"| {label.strip()} | {' | '.join(cells)} |" for label, cells in table.rows]
    head = f"| | {' | '.join(table.columns)} |"
    taken = [f"- {prose(removed_words(removed)[:300])}" for removed in result.verified.removed]
    parts = [
        f"#### {measured_title(result)}",
        prose(first),
        "\n".join(["Taken out in memory:", "", *taken]) if taken else "",
        "\n".join([head, "| --- |" + " ---: |" * len(table.columns), *rows]),
        prose(" ".join(others)),
    ]
    return "\n\n".join(part for part in parts if part)


def _cost(result: Result) -> str:
    step = summary.step_after(result)
    if step is None or step.measured:  # what was measured has a table of its own
        return ""
    return " ".join([*summary.waste_sentences(result), *step_time_sentences(result)])


def _blocks(result: Result) -> str:
    groups = block_groups(result.regions)
    if not groups:
        return ""
    rows = [
        f"| {code(group.label, 80)} | {len(group.regions)} "
        f"| **{units.times(group.first.recompute_runs_per_backward)}** "
        f"| {units.ms(group.recompute_ms)} | {units.ms(group.redundant_ms)} |"
        for group in groups[:_MOST_GROUPS]
    ]
    head = ["| Block | Number | Recomputes each | Recomputes per step | Redundant per step |"]
    table = "\n".join([*head, "| --- | ---: | ---: | ---: | ---: |", *rows])
    more = len(groups) - _MOST_GROUPS
    return table + (f"\n\n{units.plural(more, 'more kind')} of block left out." if more > 0 else "")


def _who(result: Result) -> str:
    stacks = checkpoint_stacks(result.regions)
    if not stacks:
        return ""
    written = ["#### Checkpoint call sites, outer to inner"]
    for stack in stacks[:_MOST_STACKS]:
        items = [
            f"{number}. {_checkpoint(checkpoint)}"
            for number, checkpoint in enumerate(stack.checkpoints, start=1)
        ]
        written.append("\n".join([f"Blocks {code(stack.label, 80)}:", "", *items]))
    return "\n\n".join(written)


def _checkpoint(checkpoint: Checkpoint) -> str:
    text = f"{words.variant_words(checkpoint)}: {prose(words.mechanism_words(checkpoint)[:200])}"
    if checkpoint.call_site:
        text += f", {code(checkpoint.call_site)}"
    if checkpoint.source:
        text += f": {code(words.one_line(checkpoint.source), 200)}"
    return text


def _finding(finding: Finding) -> str:
    written = [
        f"#### {code(finding.code, 40)} {prose(finding.title[:300])}",
        f"{code(finding.name, 60)}, {finding.severity}, {finding.confidence} confidence. "
        f"{prose(finding.detail[:2000])}",
    ]
    if finding.evidence:
        written.append("\n".join(f"- {prose(item[:600])}" for item in finding.evidence))
    if finding.fix is not None:
        fix = finding.fix
        written.append(f"**Fix:** {prose(fix.summary[:400])}")
        written.append(f"Risk: {prose(words.risk_words(fix)[:400])}")
        if fix.diff:
            written.append(fence(fix.diff, "diff"))
    return "\n\n".join(written)


def _hta(result: Result) -> str:
    if result.hta is None:
        return ""
    rows = [f"| {prose(label)} | {value} | {own} |" for label, value, own in hta_rows(result.hta)]
    head = [f"| | {' | '.join(HTA_COLUMNS)} |", "| --- | ---: | ---: |"]
    return "\n\n".join([f"#### {hta_title(result)}", HTA_SAYS, "\n".join([*head, *rows])])


def _warnings(result: Result) -> str:
    notes = [f"- {prose(note[:600])}" for note in result.warnings]
    notes += [f"- {code(name)}: {number}" for name, number in summary.health_counters(result)]
    return "\n".join(["#### Worth knowing", "", *notes]) if notes else ""


def _environment(result: Result) -> str:
    shown = list(result.environment.items())[:_MOST_ENVIRONMENT]
    rows = [f"| {code(name, 60)} | {code(value)} |" for name, value in shown]
    if not rows:
        return ""
    table = "\n".join(["| | |", "| --- | --- |", *rows])
    return f"<details><summary>Environment</summary>\n\n{table}\n\n</details>"
