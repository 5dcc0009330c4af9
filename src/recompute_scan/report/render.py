"""A result as text, as Markdown, as a page and for a notebook, and a comparison of two results.

On a terminal only paths, source lines, commands and diffs may be wider than its columns, since they
are there to be copied. In Markdown nothing from the result can close a fence, start markup, mention
a person or refer to an issue.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from markupsafe import Markup
from msgspec import Struct
from msgspec.structs import astuple

from recompute_scan import units
from recompute_scan.frameworks.registry import find_title
from recompute_scan.report import summary
from recompute_scan.report.blocks import (
    WIDTH,
    Page,
    Section,
    checkpoint_stacks,
    columns,
    wrap,
)
from recompute_scan.report.figures import (
    FAMILY_FILLS,
    PART_FILLS,
    BarPart,
    Picture,
    picture,
    stacked,
)
from recompute_scan.report.sections import answer, correctness, cost, layers, plan, run
from recompute_scan.report.sections.answer import MOST_LINES, answer_text
from recompute_scan.report.summary import diff_lines
from recompute_scan.report.templating import (
    fill,
    fill_part,
    markdown_code,
    markdown_prose,
    regions_csv,
    script_json,
    visible,
)
from recompute_scan.report.words import family_words
from recompute_scan.result import Result, to_json
from recompute_scan.result.compare import Comparison, Mark, Side, Switch
from recompute_scan.result.run_record import NextCommand
from recompute_scan.units import count, ms, pct, plural, times

# In the order in which they are read, which every rendering follows.
SECTIONS: tuple[Section, ...] = (
    answer.FAILURE,
    plan.PLANNED_CHECKPOINTS,
    answer.FIRST_SCREEN,
    cost.MEASURED_FIX,
    cost.STEP_COST,
    layers.RUN_BY_RUN,
    layers.BLOCK_BY_BLOCK,
    layers.RECOMPUTED_BY_DESIGN,
    run.RANK_BY_RANK,
    layers.CHECKPOINT_SITES,
    correctness.COMPILED_CODE,
    answer.FINDINGS_AND_FIXES,
    correctness.SAME_COMPUTATION,
    run.EARNS,
    correctness.SELECTIVE_POLICIES,
    run.MEMORY_SNAPSHOTS,
    answer.HOW_TO_CHECK,
    cost.DEVICE_USE,
    cost.HTA_FIGURES,
    answer.EVERY_RULE,
    layers.STEPS_AND_FAMILIES,
    run.TRACE_HEALTH,
    answer.METHOD,
)


def sections_of(result: Result) -> tuple[Section, ...]:
    """Those that this result has, in the order in which they are read."""
    return tuple(section for section in SECTIONS if section.present(result))


def render_text(
    result: Result,
    *,
    color: bool,
    report: str | None = None,
    after: Sequence[NextCommand] | None = None,
    folder: str = "",
    width: int = WIDTH,
) -> str:
    """The summary, ending in a line end.

    ``report`` is the path of the written page. ``after`` and ``folder`` are as of
    :func:`recompute_scan.report.summary.with_next_steps`. With ``color`` the same characters carry
    ANSI codes; nothing else differs.
    """
    page = Page(color, width)
    result = summary.with_next_steps(result, after, folder)
    planned = _is_plan(result)
    for section in (plan.PLANNED_CHECKPOINTS,) if planned else sections_of(result):
        section.write(page, result)
    if report is not None:
        page.title("Report")
        page.verbatim(visible(report, 4096), "  ", underline=True)
    # The command that an inconclusive trace needs is with the reason, above.
    told = result.verdict == "inconclusive" and result.crash is None
    if result.next_steps and not planned and not told:
        lacks = "" if after is not None else summary.lack_sentence(result, result.next_steps)
        list_commands(page, result.next_steps, lacks)
    return "\n".join(page.written).rstrip("\n") + "\n"


def render_answer(
    result: Result,
    *,
    color: bool,
    report: str | None = None,
    after: Sequence[NextCommand] | None = None,
    folder: str = "",
    width: int = WIDTH,
) -> str:
    """The answer in 15 lines of 80 columns, ending in a line end; arguments as of
    :func:`render_text`. Only a path or a command that is longer than a line makes more of them.
    """
    page = Page(color, width)
    result = summary.with_next_steps(result, after, folder)
    planned = _is_plan(result)
    groups = plan.answer_text(page, result) if planned else answer_text(page, result)
    shown = [("report", report)] if report is not None else []
    commands = () if planned else result.next_steps
    if len(commands) == 1 and result.verdict != "inconclusive" and not result.crash:
        page.prose(commands[0].what)
        groups.append(page.taken())
    rows = [*shown, *map(_labelled, commands)]
    # If lines are short, the diff that is shown and the measurement go before the change.
    least = len(shown) if commands and commands[-1].purpose == "apply" else -1
    said = _fit(groups, rows, len(shown) + 1, least, width)
    if after is None and len(said) < MOST_LINES:
        page.prose(summary.lack_sentence(result, commands))
    return "\n".join(said + page.taken()) + "\n"


def _is_plan(result: Result) -> bool:
    return result.plan is not None and result.crash is None


def _fit(
    groups: list[list[str]], rows: list[tuple[str, str]], fewest: int, least: int, width: int
) -> list[str]:
    """Groups of lines and then labelled commands, as many of these as fit, with blank lines if they
    do; the command at ``least`` goes first.
    """

    def taken(lines: Sequence[str]) -> int:
        return sum(-(-max(columns(click.unstyle(line)), 1) // width) for line in lines)

    left = MOST_LINES - sum(map(taken, groups))
    while len(rows) > fewest and taken(_lined_up(rows)) > left:
        rows.pop(least)
    commands = _lined_up(rows)
    left -= taken(commands)
    lines = [*groups[0]]
    for group in [*groups[1:], commands]:
        if left > 0 and group:
            lines.append("")
            left -= 1
        lines += group
    return lines


def list_commands(page: Page, commands: Sequence[NextCommand], lacks: str) -> None:
    """The commands, a line each behind a word; one alone with its reason, all with their lack."""
    page.title("Next")
    if len(commands) == 1 and commands[0].what:
        page.prose(commands[0].what)
    page.written += _lined_up([_labelled(one) for one in commands])
    page.prose(lacks)


def _labelled(one: NextCommand) -> tuple[str, str]:
    return "gradients" if one.purpose == "compare-gradients" else one.purpose, one.text


def _lined_up(rows: Sequence[tuple[str, str]]) -> list[str]:
    wide = max((len(label) for label, _ in rows), default=0)
    return [f"  {label:<{wide}}  {visible(text, 4096)}" for label, text in rows]


def render_markdown(
    result: Result, after: Sequence[NextCommand] | None = None, folder: str = ""
) -> str:
    """The summary as GitHub-flavoured Markdown, ending in a line end; arguments as of
    :func:`render_text`.
    """
    result = summary.with_next_steps(result, after, folder)
    parts = [section.as_markdown(result) for section in sections_of(result)]
    steps = [
        f"- {markdown_prose(one.what)} {markdown_code(one.text, 500)}"
        for one in result.next_steps
        if result.crash is not None or result.verdict != "inconclusive"
    ]
    parts.append("\n".join(["**Next**", "", *steps] if steps else []))
    parts.append(f"recompute-scan {markdown_code(result.tool_version, 20)}")
    return "\n\n".join(part for part in parts if part) + "\n"


# Characters of JSON that the page carries; a larger result is left to its own file.
MOST_JSON = 3_000_000
# Arrangements of checkpoints, and findings, that a notebook shows; the page has the others.
_MOST_BRIEF = 4


def render_html(
    result: Result, after: Sequence[NextCommand] | None = None, folder: str = ""
) -> str:
    """The report as one HTML document; the same result gives the same text.

    Other arguments as of :func:`render_text`.
    """
    json = script_json(to_json(result))
    attachments = {
        "markdown": render_markdown(result, after, folder),
        "csv": regions_csv(result),
        "json": Markup(json) if len(json) <= MOST_JSON else None,  # noqa: S704 - quoted
    }
    result = summary.with_next_steps(result, after, folder)
    sections = sections_of(result)
    return fill(
        "page.html",
        result=result,
        answer=summary.shortest_answer(result),
        measured=summary.what_was_measured(result),
        sections=sections,
        parts=[_section(section, result, attachments) for section in sections],
        help=[section.help for section in SECTIONS if section.help],
    )


def render_brief_html(result: Result) -> str:
    """Verdict, picture, three numbers, call sites and what to change, without script and style.

    An HTML fragment; every name in it is escaped. The picture is an image, since pages that show
    other people's notebooks take drawings out of them.
    """
    drawn = picture(result)
    diffs = [finding.fix.diff for finding in result.findings if finding.fix]
    return fill_part(
        "brief.html",
        result=result,
        numbers=summary.key_numbers(result),
        fix_sentence=summary.fix_sentence(result),
        drawing=_static(drawn) if drawn else "",
        drawn=_said(drawn) if drawn else "",
        diff=diff_lines(next((diff for diff in diffs if diff), "")) if any(diffs) else (),
        stacks=checkpoint_stacks(result.regions),
        most=_MOST_BRIEF,
    )


def _static(drawn: Picture) -> str:
    """The picture as a file of SVG in base64."""
    filled = fill_part(
        "picture_static.html", picture=drawn, fills=PART_FILLS, family_fills=FAMILY_FILLS
    )
    return base64.b64encode(filled.strip().encode()).decode()


def _said(drawn: Picture) -> str:
    """The picture in words, for readers who cannot see it."""
    lanes = [f"{drawn.block}: {'; '.join(run.title for run in drawn.runs)}."] if drawn.runs else []
    return " ".join([drawn.bars.summary if drawn.bars else "", *lanes]).strip()


def _section(section: Section, result: Result, attachments: Mapping[str, Any]) -> Markup:
    filled = fill_part(
        section.template,
        section=section,
        result=result,
        heading=section.heading(result),
        attachments=attachments,
        **({"lead": section.lead(result)} if section.lead else {}),
        **section.html(result),
    )
    return Markup(filled)  # noqa: S704 - escaped by the template


_SAME_PCT = 0.05  # what one digit after the point shows as nothing


def step_sentence(comparison: Comparison) -> str:
    """How the step changed, as time and as throughput; only what is sure."""
    before, after = comparison.before.step_ms, comparison.after.step_ms
    time, throughput = comparison.time_change_pct, comparison.throughput_change_pct
    if comparison.obstacles:
        return "The step times cannot be compared."
    if time is None or throughput is None:
        return "The step times cannot be compared: one is unknown."
    spread = f"{span(comparison.before)} before, {span(comparison.after)} after"
    if abs(time) < _SAME_PCT:
        within = f"; step times: {spread}" if comparison.difference else ""
        return f"The median step takes as long as before, {ms(after)}{within}."
    more, other = ("more", "less") if time > 0 else ("less", "more")
    change = f"A step takes {ms(after)} instead of {ms(before)}"
    if comparison.difference == "none":
        return (
            f"{change}, which lies within the spread of the step times ({spread}): whether it "
            "takes more or less time than before is not known."
        )
    if comparison.difference == "direction":
        return (
            f"A step takes {more} time than before, {ms(after)} instead of {ms(before)}; the step "
            f"times vary too much for a percentage ({spread})."
        )
    said = f"{change}: {pct(abs(time))} {more} time, {pct(abs(throughput))} {other} throughput."
    if comparison.difference is None:
        said += " With fewer than six steps on a side, it may be chance."
    return said


def cautions(comparison: Comparison) -> tuple[str, ...]:
    """The warnings that are no obstacles."""
    return tuple(w for w in comparison.warnings if w not in comparison.obstacles)


class StepBar(Struct, frozen=True):
    """One step, drawn as its recomputes and the rest."""

    name: str
    total: str
    parts: tuple[BarPart, ...]


def step_bars(comparison: Comparison) -> tuple[StepBar, ...]:
    """The two steps on one scale; empty where what recomputes take is not known of both, or where
    they cannot be compared.
    """
    if comparison.obstacles:
        return ()
    sides = (("Before", comparison.before), ("After", comparison.after))
    scale = max(side.step_ms or 0.0 for _, side in sides)
    bars = []
    for name, side in sides:
        step, recomputes, redundant = side.step_ms, side.recompute_ms, side.redundant_recompute_ms
        if not step or recomputes is None or redundant is None or recomputes > step:
            return ()
        values = {
            "other": step - recomputes,
            "recompute": recomputes - redundant,
            "redundant": redundant,
        }
        bars.append(StepBar(name, ms(step), stacked(values, scale)))
    return tuple(bars)


def rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Label, before, after."""
    cells: tuple[tuple[str, Callable[[Side], str]], ...] = (
        ("Verdict", lambda side: side.verdict),
        ("Recomputes per layer", lambda side: times(side.recompute_per_backward)),
        ("Mean over all work", lambda side: times(side.mean_recompute)),
        ("Step time", lambda side: ms(side.step_ms)),
        ("Likely", span),
        ("Step time from", _source),
        ("Recomputes per step", lambda side: ms(side.recompute_ms)),
        ("Redundant among them", lambda side: ms(side.redundant_recompute_ms)),
    )
    return [(label, cell(comparison.before), cell(comparison.after)) for label, cell in cells]


def call_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Family; forward calls per step before and after; those run again before and after."""
    return [
        (family_words(family), *("-" if one is None else count(one) for one in numbers))
        for family, *numbers in map(astuple, comparison.calls)
    ]


def changes(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The lists of a comparison under their titles: gone, new, still there; none that is empty."""
    titles = ("Went away", "New", "Still there")
    if not comparison.same_forward_work:  # of another model, nothing went away
        titles = ("Only before", "Only after", "In both")
    lists = (
        _items(comparison.findings_gone, comparison.checkpoints_gone, "before"),
        _items(comparison.findings_new, comparison.checkpoints_new, "after"),
        _items(comparison.findings_kept, comparison.checkpoints_kept, ""),
    )
    return [(title, items) for title, items in zip(titles, lists, strict=True) if items]


def _items(findings: tuple[Mark, ...], switches: tuple[Switch, ...], side: str) -> list[str]:
    marks = [f"{mark.code} {mark.name}: {mark.title}" for mark in findings]
    return [*marks, *(_switch(switch, side) for switch in switches)]


def _switch(switch: Switch, side: str) -> str:
    name = find_title(switch.mechanism) or switch.mechanism or "a checkpoint"
    variant = f", {switch.variant}" if switch.variant else ""
    place = f" at {switch.call_site}" if switch.call_site else ""
    before, after = switch.blocks_before, switch.blocks_after
    if side or before == after:
        blocks = plural(before if side == "before" else after, "block")
    else:
        blocks = f"{plural(after, 'block')} instead of {count(before)}"
    return f"{name}{variant}{place}, around {blocks}"


def span(side: Side) -> str:
    """``71.1 to 363.4 ms``: where the median of the side's steps lies."""
    return units.span(side.step_low_ms, side.step_high_ms)


def _source(side: Side) -> str:
    if side.step_source is None:
        return "-"
    number = plural(side.steps, "step")
    if side.step_source == "measured":
        return f"{number} of --verify" if side.steps else "--verify"
    if side.step_source == "timed":
        return f"{number}, timed" if side.steps else "timed steps"
    return f"{number}, traced" if side.steps else "the trace"


_MOST_CALLS = 20


def render_comparison_text(comparison: Comparison) -> str:
    """The comparison, ending in a line end."""
    written: list[str] = []
    if comparison.obstacles:
        written += [step_sentence(comparison), *_list(comparison.obstacles), ""]
    for label, side in (("Before", comparison.before), ("After", comparison.after)):
        written += wrap(visible(side.name, 400), " " * 8, f"{label + ':':<8}")
        written += wrap(visible(side.headline, 400), " " * 8, " " * 8)
    if not comparison.obstacles:
        written += ["", *wrap(step_sentence(comparison), "", "")]
    written += ["", f"  {'':<24}{'before':>20}{'after':>20}"]
    written += [f"  {label:<24}{one:>20}{other:>20}" for label, one, other in rows(comparison)]
    for title, items in changes(comparison):
        written += ["", title, *_list(items)]
    calls = call_rows(comparison)
    if calls:
        written += ["", "Calls per step that differ"]
        written.append(f"  {'':<24}{'forward':>16}{'run again':>22}")
        written += [
            f"  {visible(name, 24):<24}{_arrow(a, b):>16}{_arrow(c, d):>22}"
            for name, a, b, c, d in calls[:_MOST_CALLS]
        ]
        if len(calls) > _MOST_CALLS:
            written.append(f"  and {len(calls) - _MOST_CALLS} more families (see the JSON)")
    if notes := cautions(comparison):
        written += ["", "Note", *_list(notes)]
    return "\n".join(written) + "\n"


def render_comparison_answer(comparison: Comparison) -> str:
    """The changes, in at most 15 lines."""
    page = Page(color=False)
    for label, side in (("Before", comparison.before), ("After", comparison.after)):
        number = times(side.recompute_per_backward)
        page.cut(f"{label + ':':<8}{side.name}: {side.verdict}, {number} recomputes per layer", "")
    page.prose(step_sentence(comparison), "", most=3)
    said = [*comparison.obstacles, *cautions(comparison)]
    # First the changes, then the first doubt.
    lines = [f"{title}: {item}" for title, items in changes(comparison) for item in items]
    shown = [*lines[: 3 if said else 4], *(f"Note: {item}" for item in said[:1])]
    for line in shown:
        page.prose(line, "    ", "  ", most=2)
    if left := len(lines) + len(said) - len(shown):
        page.prose(f"and {left} more (-v)")
    return "\n".join(page.written) + "\n"


def _list(items: Sequence[str]) -> list[str]:
    return [line for item in items for line in wrap(visible(item, 400), "    ", "  - ")]


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def render_comparison_html(comparison: Comparison) -> str:
    """The page; the same comparison gives the same text."""
    return fill(
        "compare.html",
        comparison=comparison,
        sentence=step_sentence(comparison),
        bars=step_bars(comparison),
        redundant=any(s.redundant_recompute_ms for s in (comparison.before, comparison.after)),
        rows=rows(comparison),
        changes=changes(comparison),
        cautions=cautions(comparison),
        calls=call_rows(comparison),
    )
