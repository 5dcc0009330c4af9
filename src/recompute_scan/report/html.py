"""The page: one HTML file that opens offline, asks for nothing, and reads without script.

And what a notebook shows of a scan: a fragment without script and style.
"""

from __future__ import annotations

import base64

from markupsafe import Markup

from recompute_scan.report import summary
from recompute_scan.report.attachments import Attachments, regions_csv
from recompute_scan.report.commands import diff_lines
from recompute_scan.report.contents import SECTIONS, sections_of
from recompute_scan.report.escape import script_json
from recompute_scan.report.groups import checkpoint_stacks
from recompute_scan.report.picture import FAMILY_FILLS, PART_FILLS, Picture, picture
from recompute_scan.report.section import Section
from recompute_scan.report.templating import fill, fill_part
from recompute_scan.report.text import render_markdown
from recompute_scan.result import Result, to_json

# Characters of JSON that the page carries; a larger result is left to its own file.
MOST_JSON = 3_000_000
# Arrangements of checkpoints, and findings, that a notebook shows; the page has the others.
_MOST_BRIEF = 4


def render_html(result: Result) -> str:
    """The report as one HTML document; the same result gives the same text."""
    sections = sections_of(result)
    attachments = _attachments(result)
    return fill(
        "page.html",
        result=result,
        answer=summary.shortest_answer(result),
        sections=sections,
        parts=[_section(section, result, attachments) for section in sections],
        help=[section.help for section in SECTIONS if section.help],
    )


def render_brief_html(result: Result) -> str:
    """Verdict, picture, three numbers, call sites and what to change, without script and style.

    An HTML fragment; every name in it is escaped. The picture is an image of its own, since pages
    that show other people's notebooks take drawings out of them.
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
    """What the picture shows, for whom it is not shown."""
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


def _attachments(result: Result) -> Attachments:
    json = script_json(to_json(result))
    return Attachments(
        markdown=render_markdown(result),
        csv=regions_csv(result),
        json=Markup(_quoted(json)) if len(json) <= MOST_JSON else None,  # noqa: S704 - quoted
    )


def _quoted(json: str) -> str:
    """JSON without ``<``, ``>`` and ``&`` needs no more quoting between tags."""
    if any(char in json for char in "<>&"):
        raise ValueError("this JSON is not quoted for a page")
    return json
