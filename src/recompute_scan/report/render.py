"""The report as text, as Markdown, as a page, and as what a notebook shows.

On a terminal only paths, source lines, commands and diffs may be wider than its columns, since they
are there to be copied. In Markdown nothing from the result can close a fence, start markup, mention
a person or refer to an issue.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from markupsafe import Markup
from msgspec.structs import replace

from recompute_scan.report import summary
from recompute_scan.report.blocks import WIDTH, Page, Section, checkpoint_stacks, columns, printed
from recompute_scan.report.figures import FAMILY_FILLS, PART_FILLS, Picture, picture
from recompute_scan.report.sections import answer, correctness, cost, layers, plan, run, usage
from recompute_scan.report.sections.answer import MOST_LINES, answer_text
from recompute_scan.report.summary import diff_lines
from recompute_scan.report.templating import (
    Attachments,
    fill,
    fill_part,
    markdown_prose,
    regions_csv,
    script_json,
    visible,
)
from recompute_scan.report.templating import (
    markdown_code as code,
)
from recompute_scan.result import Result, to_json
from recompute_scan.result.run_record import NextCommand

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
    usage.EARNS,
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
    links: bool = False,
) -> str:
    """The summary, ending in a line end.

    ``report`` is the path of the written page. ``after`` and ``folder`` are as of
    :func:`recompute_scan.report.summary.with_next_steps`. With ``color`` the same characters carry
    ANSI codes; nothing else differs. With ``links`` a call site links to its file (OSC 8)
    where that is here.
    """
    page = Page(color, width, links)
    result = summary.with_next_steps(result, after, folder)
    if _is_plan(result):
        plan.PLANNED_CHECKPOINTS.text(page, result)
        result = replace(result, next_steps=())
    else:
        for section in sections_of(result):
            section.text(page, result)
    next_steps(page, report, result)
    return "\n".join(page.written).rstrip("\n") + "\n"


def render_answer(
    result: Result,
    *,
    color: bool,
    report: str | None = None,
    after: Sequence[NextCommand] | None = None,
    folder: str = "",
    width: int = WIDTH,
    links: bool = False,
) -> str:
    """The answer in 15 lines of 80 columns, ending in a line end; arguments as of
    :func:`render_text`. Only a path or a command that is longer than a line makes more of them.
    """
    page = Page(color, width, links)
    result = summary.with_next_steps(result, after, folder)
    planned = _is_plan(result)
    groups = plan.answer_text(page, result) if planned else answer_text(page, result)
    rows = [("report", report)] if report is not None else []
    commands = () if planned else result.next_steps
    steps = [(_LABELS.get(one.purpose, one.purpose), one.text) for one in commands]
    wide = max((len(label) for label, _ in rows + steps), default=0)
    if len(steps) == 1 and result.verdict != "inconclusive" and not result.crash:
        page.prose(result.next_steps[0].what)
        groups.append(page.taken())
    for label, text in rows + steps:
        page.verbatim(f"{label:<{wide}}  {visible(text, 4096)}", "  ")
    return "\n".join(_fit(groups, page.taken(), len(rows) + 1, width)) + "\n"


def _is_plan(result: Result) -> bool:
    return result.plan is not None and result.crash is None


def _fit(
    groups: list[list[str]], commands: list[str], fewest: int, width: int, most: int = MOST_LINES
) -> list[str]:
    """Groups of lines and then commands, as many of these as fit, with blank lines if they do."""

    def taken(lines: Sequence[str]) -> int:
        return sum(-(-max(columns(printed(line)), 1) // width) for line in lines)

    left = most - sum(map(taken, groups))
    while len(commands) > fewest and taken(commands) > left:
        commands = commands[:-1]
    left -= taken(commands)
    lines = [*groups[0]]
    for group in [*groups[1:], commands]:
        if left > 0 and group:
            lines.append("")
            left -= 1
        lines += group
    return lines


def next_steps(page: Page, report: str | None, result: Result) -> None:
    """Where the page is, and the commands that come next.

    The one that an inconclusive trace needs is with the reason, above.
    """
    if report is not None:
        page.title("Report")
        page.verbatim(visible(report, 4096), "  ", underline=True)
    if not result.next_steps or (result.verdict == "inconclusive" and result.crash is None):
        return
    list_commands(page, result.next_steps)


_LABELS = {"compare-gradients": "gradients"}


def list_commands(page: Page, commands: Sequence[NextCommand]) -> None:
    """The commands, a line each behind a word; one alone with its reason."""
    page.title("Next")
    if len(commands) == 1 and commands[0].what:
        page.prose(commands[0].what)
    labels = [_LABELS.get(one.purpose, one.purpose) for one in commands]
    for label, one in zip(labels, commands, strict=True):
        page.verbatim(f"{label:<{max(map(len, labels))}}  {visible(one.text, 4096)}", "  ")


def render_markdown(
    result: Result, after: Sequence[NextCommand] | None = None, folder: str = ""
) -> str:
    """The summary as GitHub-flavoured Markdown, ending in a line end; arguments as of
    :func:`render_text`.
    """
    result = summary.with_next_steps(result, after, folder)
    parts = [section.markdown(result) for section in sections_of(result)]
    steps = [
        f"- {markdown_prose(one.what)} {code(one.text, 500)}"
        for one in result.next_steps
        if result.crash is not None or result.verdict != "inconclusive"
    ]
    parts.append("\n".join(["**Next**", "", *steps] if steps else []))
    parts.append(f"recompute-scan {code(result.tool_version, 20)}")
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
    attachments = _attachments(result, render_markdown(result, after, folder))
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


def _section(section: Section, result: Result, attachments: Attachments) -> Markup:
    filled = fill_part(
        section.template,
        section=section,
        result=result,
        heading=section.heading(result),
        attachments=attachments,
        **section.html(result),
    )
    return Markup(filled)  # noqa: S704 - escaped by the template


def _attachments(result: Result, markdown: str) -> Attachments:
    json = script_json(to_json(result))
    return Attachments(
        markdown=markdown,
        csv=regions_csv(result),
        json=Markup(_quoted(json)) if len(json) <= MOST_JSON else None,  # noqa: S704 - quoted
    )


def _quoted(json: str) -> str:
    """JSON without ``<``, ``>`` and ``&`` needs no more quoting between tags."""
    if any(char in json for char in "<>&"):
        raise ValueError("this JSON is not quoted for a page")
    return json
