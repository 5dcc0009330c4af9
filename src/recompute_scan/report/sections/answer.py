"""Sections that answer: first screen, findings, how to check, failures, rules and method."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from recompute_scan.crash import Crash, RankEnd
from recompute_scan.report import summary, words
from recompute_scan.report.blocks import (
    Page,
    Section,
    always,
    analysed,
    checkpoint_stacks,
    columns,
    fitted,
    known,
    of_memory_alone,
)
from recompute_scan.report.figures import picture
from recompute_scan.report.finding_words import (
    UNKNOWN_CAUSE,
    finding_anchors,
    finding_text,
    is_crash_finding,
)
from recompute_scan.report.layout import measured_sentences
from recompute_scan.report.summary import (
    DiffLine,
    diff_lines,
    fix_is_measurable,
    how_to_record,
    saving,
    script_of,
    what_was_measured,
)
from recompute_scan.report.templating import (
    lines,
    markdown_code,
    markdown_fence,
    markdown_list,
    markdown_prose,
    visible,
)
from recompute_scan.report.words import KIND_WORDS, STATUS_WORDS, plain_count_row, plain_count_table
from recompute_scan.result import MEASURED, Checked, Finding, Fix, Result
from recompute_scan.result.patch import places_of
from recompute_scan.result.recompute import DOUBLED, DOUBLED_LEAD
from recompute_scan.units import plural

# Lines of the diff on the first screen.
_MOST_DIFF = 7
_BELOW = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9_./@%+-]+")
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
    """The first fix: where it is on the page, and the lines that it changes.

    Attributes:
        file: The file that it changes.
        place: The first of these lines, as ``FILE:LINE``, of a file below the folder that the
            script was started in; else empty.
        command: What applies it; empty where nothing can.
    """

    anchor: str
    fix: Fix
    diff: tuple[DiffLine, ...]
    cut: bool
    file: str
    place: str
    command: str


def _cure(result: Result) -> _Cure | None:
    anchors = finding_anchors(result.findings)
    for anchor, finding in zip(anchors, result.findings, strict=True):
        if finding.fix is not None and result.crash is None:
            shown = _changed_lines(finding.fix.diff)
            file, line = next(iter(places_of(finding.fix.diff or "")), ("", 0))
            apply = (one.text for one in result.next_steps if one.purpose == "apply")
            return _Cure(
                anchor,
                finding.fix,
                tuple(shown[:_MOST_DIFF]),
                cut=len(shown) > _MOST_DIFF,
                file=file,
                place=f"{file}:{line}" if _BELOW.fullmatch(file) else "",
                command=next(apply, ""),
            )
    return None


def _changed_lines(diff: str | None) -> list[DiffLine]:
    """The lines added and removed, with one line that stays above each such piece."""
    found: list[DiffLine] = []
    before: DiffLine | None = None
    for one in diff_lines(diff or ""):
        if one.kind in ("add", "del"):
            found += [before, one] if before is not None else [one]
            before = None
        else:
            before = one if one.kind == "same" and one.text.strip() else None
    return found


def _first_screen_html(result: Result) -> Mapping[str, Any]:
    return {
        "level": "h2" if result.crash or result.plan else "h1",
        "analysed": analysed(result),
        "memory_alone": of_memory_alone(result),
        "reason": _further_reason(result),
        "plain": plain_count_row(result),
        "plain_rows": plain_count_table(result),
        "ranks": summary.ranks_sentence(result),
        # of a run that failed, the section on the failure says it, of a plan, the plan's
        "measured": () if result.crash or result.plan else summary.what_was_measured(result),
        "meaning": words.all_true(result, words.MEANING),
        "record": how_to_record(result),
        "pair": summary.pair_sentence(result),
        "next": next(iter(result.next_steps), None),
        "lacks": summary.lack_sentence(result, result.next_steps[:1]),
        "picture": picture(result) if result.crash is None else None,
        "cure": _cure(result),
        "attention": summary.attention_sentence(result),
    }


def _rows(result: Result, quoted: Callable[[str], str]) -> list[tuple[str, str, str]]:
    """Label, value and note of each row below the three numbers in text and in Markdown.

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


def _first_screen_text(page: Page, result: Result) -> None:
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


# Of the answer on a terminal: lines of 80 columns, and most of each of its parts.
MOST_LINES = 15
_MOST_SITES, _MOST_EDITS, _LEAST_BESIDE, _ALIKE = 3, 3, 16, 20
_EDIT_COLOUR = {"add": "green", "del": "red"}
_MORE = "and {} more (-v or the page has them)"


def answer_text(page: Page, result: Result) -> list[list[str]]:
    """The answer in groups of lines: verdict and places, the change, other findings."""
    cure = _cure(result)
    groups = []
    if result.crash is not None:
        groups.append(_failure_in_short(page, result))
    elif not analysed(result):
        page.prose(result.headline, "", most=3)
        groups.append(page.taken())
    if (result.crash is None and analysed(result)) or result.verdict != "inconclusive":
        sure = "" if result.confidence == "high" else f" ({result.confidence} confidence)"
        said = result.headline.removeprefix(DOUBLED_LEAD)
        said = f"Verdict: {result.verdict}{sure}. {said[:1].upper()}{said[1:]}"
        page.prose(said, "", most=4, fg=_VERDICT_COLOUR[result.verdict], bold=True)
        told = result.verified is not None and result.verified.outcome in MEASURED
        for sentence in measured_sentences(result)[: 2 if told else 1]:
            page.prose(sentence, most=2)
        page.prose(summary.step_sentence(result), most=2)
        groups.append(page.taken())
    if result.verdict == "inconclusive" and result.crash is None and analysed(result):
        page.prose(how_to_record(result).why, most=5)
    elif result.crash is None:
        groups.append(_sites_in_short(page, result))
    one = next((one for one in result.findings if cure and one.fix is cure.fix), None)
    if cure is None and result.crash is None:
        one = summary.foremost(result)
    if cure is None and one is not None:
        page.prose(_named(one), most=3)
        page.prose(one.detail, most=4)
    elif cure is not None and one is not None:
        if one.code != DOUBLED:  # which the verdict says
            page.prose(_named(one), most=2 if result.verified is None else 1)
        if one.wrong_gradients:  # by which operator, and where
            page.prose(one.detail, most=1)
        page.prose(f"Fix: {cure.fix.summary}", most=2 if one.wrong_gradients else 3, bold=True)
        edits = [line for line in diff_lines(cure.fix.diff or "") if line.kind in ("add", "del")]
        texts = [line.text[1:].strip() for line in edits]
        pairs = enumerate(zip(*texts, strict=False)) if len(texts) == 2 else ()
        alike = next((place for place, (one, other) in pairs if one != other), 0)
        for line, text in zip(edits[:_MOST_EDITS], texts, strict=False):
            # Of long lines, the part in which they differ.
            begin = max(0, min(alike - _ALIKE, max(map(columns, texts)) + 7 - page.width))
            shown = f"…{text[begin:]}" if begin else text
            page.cut(f"{line.text[0]} {shown}", "    ", fg=_EDIT_COLOUR[line.kind])
        if len(edits) > _MOST_EDITS:
            page.prose(f"and {plural(len(edits) - _MOST_EDITS, 'more line')}", "    ")
        if cure.fix.disposition != "safe":
            page.prose(f"Risk: {words.risk_words(cure.fix)}", most=2)
    groups += [page.taken(), _also_found(page, result, one)]
    return [group for group in groups if group]


def _sites_in_short(page: Page, result: Result) -> list[str]:
    """The call sites of the blocks that run again most often, each in a line."""
    stacks = checkpoint_stacks(result.regions)
    first = stacks[0].checkpoints[:_MOST_SITES] if stacks else ()
    for checkpoint in first:
        shown = visible(checkpoint.call_site or "place not known", page.width - 2)
        at = f"  {page.style(shown, fg='cyan')}"
        beside = f"{words.variant_words(checkpoint)}: {words.mechanism_words(checkpoint)}"
        left = page.width - columns(shown) - 4
        page.written.append(f"{at}  {fitted(beside, left)}" if left > _LEAST_BESIDE else at)
    every = {one.call_site for stack in stacks for one in stack.checkpoints}
    if more := every - {one.call_site for one in first}:
        page.prose(_MORE.format(plural(len(more), "call site")))
    elif not stacks:
        page.prose(words.first_true(result, words.NO_CALL_SITES[:1]))
    return page.taken()


def _named(finding: Finding) -> str:
    sure = "" if finding.confidence == "high" else f" ({finding.confidence} confidence)"
    return f"{finding.code} {finding.name}{sure}: {finding.title}"


def _failure_in_short(page: Page, result: Result) -> list[str]:
    """How the run failed, why where that is known, and where each rank was."""
    crash, cause = result.crash, _cause(result)
    assert crash is not None
    said = f"Run: {KIND_WORDS[crash.kind]}. {crash.headline}"
    page.prose(said, "", most=4, fg="red", bold=True)
    if cause is not None:
        page.prose(_named(cause), most=2)
        if cause.fix is not None:
            page.prose(f"Fix: {cause.fix.summary}", most=3 if len(crash.ranks) > 1 else 5)
    elif crash.kind != "killed":
        page.prose(UNKNOWN_CAUSE)
    ends = crash.ranks if len(crash.ranks) > 1 else ()
    for end in ends[:_MOST_SITES]:
        page.cut(_rank_words(end), "  ")
    if len(ends) > _MOST_SITES:
        page.prose(_MORE.format(plural(len(ends) - _MOST_SITES, "rank")))
    return page.taken()


def _also_found(page: Page, result: Result, shown: Finding | None) -> list[str]:
    """The findings that are not shown yet, and the number of notes, in a line."""
    fix = shown.fix if shown else None
    others = [
        f"{one.code} {one.name}"
        for one in result.findings
        if one is not shown and (fix is None or one.fix is not fix)
    ]
    others = [] if result.crash else list(dict.fromkeys(others))
    notes = len(result.warnings) + sum(rule.status == "error" for rule in result.checked)
    if notes:
        others.append(plural(notes, "note") + " on the recording")
    if others:
        page.cut(f"Also (-v): {', '.join(others)}", "  ")
    return page.taken()


def _first_screen_markdown(result: Result) -> str:
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
    ]
    if result.crash is not None and not result.steps:
        return "\n\n".join(parts)
    parts.append("\n".join(["| | | |", "| --- | --- | --- |", *rows]))
    if result.verdict == "inconclusive" and result.crash is None:
        parts += [f"Why: {markdown_prose(result.reason)}"] if result.reason else []
        record = how_to_record(result)
        parts += [markdown_prose(record.why[:1000]), markdown_fence(record.command, "console")]
    return "\n\n".join(parts)


FIRST_SCREEN = Section(
    anchor="verdict",
    title="Verdict",
    template="first_screen.html",
    present=always,
    html=_first_screen_html,
    text=_first_screen_text,
    markdown=_first_screen_markdown,
    help=(
        "The first screen is the answer.",
        "Checkpointing throws away what the forward pass computed and runs a block once more in "
        "the backward pass. One recompute is its price; every further one around the same block is "
        "waste.",
    ),
)


def _findings_and_fixes_text(page: Page, result: Result) -> None:
    for finding in result.findings:
        # those on a failure are below it already
        if result.crash is None or not is_crash_finding(finding):
            finding_text(page, finding)


def _finding_markdown(finding: Finding) -> str:
    written = [
        f"#### {markdown_code(finding.code, 40)} {markdown_prose(finding.title[:300])}",
        f"{markdown_code(finding.name, 60)}, {finding.severity}, {finding.confidence} confidence. "
        f"{markdown_prose(finding.detail[:2000])}",
    ]
    if finding.evidence:
        written.append(markdown_list(item[:600] for item in finding.evidence))
    if finding.fix is not None:
        fix = finding.fix
        written.append(f"**Fix:** {markdown_prose(fix.summary[:400])}")
        written.append(f"Risk: {markdown_prose(words.risk_words(fix)[:400])}")
        if fix.diff:
            written.append(markdown_fence(fix.diff, "diff"))
    return "\n\n".join(written)


FINDINGS_AND_FIXES = Section(
    anchor="findings",
    title="Findings and fixes",
    template="findings_and_fixes.html",
    present=lambda result: bool(result.findings),
    html=lambda result: {
        "anchors": finding_anchors(result.findings),
        "is_crash_finding": is_crash_finding,
        "diff_lines": diff_lines,
    },
    text=_findings_and_fixes_text,
    markdown=lambda result: "\n\n".join(map(_finding_markdown, result.findings)),
    link="Findings",
    help=(
        "Findings",
        "say what to change, as a diff where the line is known. `safe` cannot change results; "
        "`review` says why to look first.",
    ),
)


# Of this many recomputes a fix leaves the one that is needed.
_TWICE = 2.0


def _how_to_check_html(result: Result) -> Mapping[str, Any]:
    saves = saving(result) is not None and result.recompute_per_backward == _TWICE
    measurable = fix_is_measurable(result)
    return {
        "commands": [(one.what, one.text) for one in result.next_steps],
        "tried": result.verified is not None and result.verified.after is not None,
        "after_ms": result.cost.predicted_step_ms if result.cost and saves and measurable else None,
        "own_command": script_of(result) is not None,
    }


HOW_TO_CHECK = Section(
    anchor="check",
    title="How to check it",
    template="how_to_check.html",
    present=lambda result: result.crash is None and result.verdict != "inconclusive",
    html=_how_to_check_html,
    link="Verify",
)


_ENDING_WORDS = {
    "raised": "raised an exception",
    "exited": "ended itself with a failure",
    "hung": "made no progress",
    "killed": "was ended from outside",
    "ended": "ended well",
}
_MEMORY_WORDS = {
    "cuda_allocated": "on the GPU, in use",
    "cuda_peak": "on the GPU, peak",
    "cuda_reserved": "on the GPU, reserved by torch",
    "cuda_free": "on the GPU, free",
    "cuda_total": "on the GPU, in all",
    "host_peak": "of the process, peak",
}
_MOST_RANKS = 16


def _cause(result: Result) -> Finding | None:
    """The finding on the failure, which is the first where there is one."""
    first = next(iter(result.findings), None)
    return first if first is not None and is_crash_finding(first) else None


def _first_end(crash: Crash) -> RankEnd | None:
    """The rank that the headline speaks of, else the first that hangs."""
    if crash.kind == "hung":
        return next((end for end in crash.ranks if end.ending == "hung"), None)
    return next((end for end in crash.ranks if end.rank == crash.rank), None)


def _rank_words(end: RankEnd) -> str:
    """``rank 1: raised an exception at train.py:31 (RuntimeError: …)``."""
    where = f" at {visible(end.place, 200)}" if end.place else ""
    what = f" ({visible(_begun(end.errors[-1].summary), 200)})" if end.errors else ""
    return f"rank {end.rank}: {_ending_words(end)}{where}{what}"


def _ending_words(end: RankEnd) -> str:
    """How a rank ended; of one that was killed outright there is no stack."""
    if end.ending == "killed" and not end.stack:
        return "ended without a message"
    return _ENDING_WORDS[end.ending]


def _begun(text: str) -> str:
    return text if len(text) <= 120 else text[:120] + "…"


def _state_words(end: RankEnd | None) -> list[tuple[str, str]]:
    """The rank's state when it failed: steps completed, memory, models and their checkpoints."""
    if end is None:
        return []
    found = []
    if end.steps is not None:
        found.append(("Optimizer steps completed", str(end.steps)))
    for variant, number in (end.regions or {}).items():
        found.append((f"Calls of {variant} checkpoints", f"{number:,}"))
    for name, number in (end.memory or {}).items():
        found.append((f"Memory {_MEMORY_WORDS.get(name, name)}", f"{number / 2**20:,.0f} MiB"))
    for model in end.models:
        parts = [f"{model.parameters:,} parameters, {model.trainable:,} trainable"]
        parts += [*model.parallel, *(model.checkpoints or ("no checkpointed module found",))]
        if model.use_cache is not None:
            parts.append(f"use_cache={model.use_cache}")
        found.append((f"Model {visible(model.name, 60)}", visible("; ".join(parts), 600)))
    return found


def _traceback_lines(crash: Crash) -> list[str]:
    """The traceback, harmless, its middle left out where it is very long."""
    found = lines(crash.traceback or "")
    return found if len(found) <= 400 else [*found[:200], "…", *found[-200:]]


def _failure_html(result: Result) -> Mapping[str, Any]:
    crash = known(result.crash)
    return {
        "crash": crash,
        "kind": KIND_WORDS[crash.kind],
        "measured": what_was_measured(result),
        "cause": _cause(result),
        "unknown_cause": UNKNOWN_CAUSE,
        "anchors": finding_anchors(result.findings),
        "ending_words": _ending_words,
        "state": _state_words(_first_end(crash)),
        "traceback": _traceback_lines(crash),
    }


def _failure_text(page: Page, result: Result) -> None:
    crash = known(result.crash)
    page.written.append(page.style(f"Run: {KIND_WORDS[crash.kind]}", fg="red"))
    page.prose(crash.headline, "", bold=True)
    if _cause(result) is None and crash.kind != "killed":
        page.prose(UNKNOWN_CAUSE, "")
    if len(crash.ranks) > 1:
        page.title("Ranks")
        for end in crash.ranks[:_MOST_RANKS]:
            page.prose(_rank_words(end), "    ", "  ")
    if state := _state_words(_first_end(crash)):
        page.title("At that moment")
        for label, value in state:
            page.prose(f"{label}: {value}", "    ", "  ")
    for finding in filter(is_crash_finding, result.findings):
        finding_text(page, finding)
    page.written.append("")


def _failure_markdown(result: Result) -> str:
    crash = known(result.crash)
    written = [f"### Run: {KIND_WORDS[crash.kind]}", markdown_prose(crash.headline[:1000])]
    if len(crash.ranks) > 1:
        written.append(markdown_list(map(_rank_words, crash.ranks[:_MOST_RANKS])))
    state = _state_words(_first_end(crash))
    written.append(markdown_list(f"{label}: {value}" for label, value in state))
    if crash.traceback:
        written.append(markdown_fence("\n".join(_traceback_lines(crash)), "text"))
    return "\n\n".join(part for part in written if part)


FAILURE = Section(
    anchor="crash",
    title="How the run failed",
    template="failure.html",
    present=lambda result: result.crash is not None,
    html=_failure_html,
    text=_failure_text,
    markdown=_failure_markdown,
    link="Failure",
)


def _every_rule_html(result: Result) -> Mapping[str, Any]:
    """How many rules came to what, in words, and a row for those with one status and reason."""
    rows: dict[tuple[str, str | int], list[Checked]] = {}
    for rule in result.checked:
        rows.setdefault((rule.status, rule.why or id(rule)), []).append(rule)
    counts = Counter(rule.status for rule in result.checked)
    said = [f"{number} {STATUS_WORDS[status]}" for status, number in counts.most_common()]
    count = f"{plural(len(result.checked), 'rule')}: {', '.join(said)}"
    return {"count": count, "rows": list(rows.values())}


EVERY_RULE = Section(
    anchor="rules",
    title="Every rule and its outcome",
    template="every_rule.html",
    present=lambda result: bool(result.checked),
    html=_every_rule_html,
    link="All rules",
)


METHOD = Section(
    anchor="method",
    title="Method, words and raw data",
    template="method.html",
    present=always,
    link="Method",
)
