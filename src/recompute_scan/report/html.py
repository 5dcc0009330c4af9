"""The page: one HTML file that opens offline, asks for nothing, and reads without script.

Style and script stand in the page and are allowed by their hashes only; everything else is
refused by the content policy, so that even a name that slipped through could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
from markupsafe import Markup, escape

from recompute_scan import units
from recompute_scan.report import failed, summary, utilization, words
from recompute_scan.report.attachments import proof_trace, regions_csv
from recompute_scan.report.bars import cost_bars
from recompute_scan.report.escape import inert, lines, script_json, shorten, visible
from recompute_scan.report.groups import block_groups, block_label, by_step, checkpoint_stacks
from recompute_scan.report.markdown import render_markdown
from recompute_scan.report.measured import (
    measured_sentences,
    measured_table,
    measured_title,
    removed_words,
)
from recompute_scan.report.plain_count import COLUMNS as PLAIN_COLUMNS
from recompute_scan.report.plain_count import HOW as PLAIN_HOW
from recompute_scan.report.plain_count import plain_count_row, plain_count_table
from recompute_scan.report.rank_groups import MANY_RANKS, MOST_RANKS, rank_groups, ranks_sentence
from recompute_scan.report.side_by_side import family_table, timeline
from recompute_scan.report.spread import step_time_sentences
from recompute_scan.result import Checkpoint, Region, Result, to_json

# Rows shown before the table folds blocks that are like one already shown.
MOST_ROWS = 60
MOST_FOLDED = 2000
# Characters of JSON that the page carries; a larger result is left to its own file.
MOST_JSON = 3_000_000
_CODE = re.compile(r"`([^`]+)`|(?<!\S)(--[a-z][a-z-]*)(?![\w-])")


@dataclass(frozen=True)
class DiffLine:
    """One line of a diff: ``kind`` is ``add``, ``del``, ``hunk``, ``file`` or ``same``."""

    kind: str
    text: str


@dataclass(frozen=True)
class RegionRows:
    """Rows of the table per module: shown at once, folded away, and left to the JSON."""

    shown: tuple[Region, ...]
    folded: tuple[Region, ...]
    left_out: int


def render_html(result: Result) -> str:
    """The report as one HTML document; the same result gives the same text."""
    json = script_json(to_json(result))
    return fill(
        "page.html",
        result=result,
        crash=result.crash,
        failure=failed,
        # A run that failed before its first recorded step has nothing else to show.
        analysed=result.crash is None or bool(result.steps),
        numbers=summary.key_numbers(result),
        reason=summary.further_reason(result),
        waste=summary.waste_sentences(result),
        step_times=step_time_sentences(result),
        measured=measured_table(result),
        measured_title=measured_title(result),
        measured_says=measured_sentences(result),
        removed=removed_words,
        bars=cost_bars(result),
        ratio=utilization.ratio_row(result),
        flops_rows=utilization.flops_table(
            result.flops, told_apart=result.verdict != "inconclusive"
        )
        if result.flops
        else [],
        flops_says=utilization.flops_sentences(result.flops) if result.flops else [],
        plain=plain_count_row(result),
        plain_rows=plain_count_table(result),
        plain_columns=PLAIN_COLUMNS,
        plain_how=PLAIN_HOW,
        proof=timeline(result),
        proof_families=family_table(result.proof) if result.proof else [],
        rows=region_rows(result.regions),
        by_step=by_step(result),
        ranks=rank_groups(result) if len(result.ranks) > 1 else (),
        ranks_say=ranks_sentence(result),
        many_ranks=MANY_RANKS,
        most_ranks=MOST_RANKS,
        groups=block_groups(result.regions),
        stacks=checkpoint_stacks(result.regions),
        anchors=summary.finding_anchors(result.findings),
        commands=summary.check_commands(result),
        health=summary.health_counters(result),
        own_command=summary.run_again(result) is not None,
        markdown=render_markdown(result),
        csv=regions_csv(result),
        excerpt=proof_trace(result.proof) if result.proof else "",
        hta_rows=utilization.hta_rows(result.hta) if result.hta else [],
        hta_title=utilization.hta_title(result),
        hta_columns=utilization.HTA_COLUMNS,
        hta_says=utilization.HTA_SAYS,
        memory_says=utilization.memory_sentences(result.memory) if result.memory else [],
        plans=utilization.plan_chart(result.memory) if result.memory else None,
        json=Markup(_text(json)) if len(json) <= MOST_JSON else None,  # noqa: S704 - quoted
    )


def fill(template: str, **values: Any) -> str:
    """A page of ours: the template with our style, our script, and a policy that allows no other.

    Args:
        template: Name of a file in ``templates/``.
        values: What it shows, beside words and units, which every template has.
    """
    style, script = _asset("style.css"), _asset("script.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return fill_part(template, style=style, script=script, policy=policy, **values)


def fill_part(template: str, **values: Any) -> str:
    """The template with its values, escaped, and words and units; no page around it."""
    return _environment().get_template(template).render(words=words, units=units, **values)


def region_rows(regions: Sequence[Region]) -> RegionRows:
    """The first rows and every block unlike them; blocks that repeat one are folded."""
    shown = list(regions[:MOST_ROWS])
    seen = {_likeness(region) for region in shown}
    folded = []
    for region in regions[MOST_ROWS:]:
        if _likeness(region) in seen or len(shown) >= 2 * MOST_ROWS:
            folded.append(region)
        else:
            seen.add(_likeness(region))
            shown.append(region)
    return RegionRows(tuple(shown), tuple(folded[:MOST_FOLDED]), len(folded[MOST_FOLDED:]))


def _likeness(region: Region) -> tuple[str | None, float, tuple[Checkpoint, ...]]:
    return (
        region.module_class,
        round(region.recompute_runs_per_backward, 1),
        region.checkpoints,
    )


def diff_lines(diff: str) -> list[DiffLine]:
    """A unified diff, line by line, for colouring; the text itself is not changed."""
    return [DiffLine(_diff_kind(line), line) for line in lines(diff.rstrip("\n"))]


def _diff_kind(line: str) -> str:
    if line.startswith(("+++", "---", "diff ", "index ")):
        return "file"
    if line.startswith("@@"):
        return "hunk"
    return {"+": "add", "-": "del"}.get(line[:1], "same")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("recompute_scan.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update(
        name=visible,
        prose=_prose,
        ms=units.ms,
        clock=units.microseconds,
        pct=units.pct,
        share=units.share,
        times=units.times,
        count=units.count,
        lines=lines,
        source_line=lambda line: shorten(line, 200),
        diff=diff_lines,
        web_link=_web_link,
        block=lambda region: visible(block_label(region)),
    )
    return environment


def _finalize(value: Any) -> Any:
    """The last word on every value that a template prints, should a filter be forgotten."""
    if value is None:
        return units.UNKNOWN
    if isinstance(value, str) and not isinstance(value, Markup | Undefined):
        return inert(value, keep="\n\t")
    return value


def _prose(text: str, limit: int) -> Markup:
    """A sentence in which what stands between backticks, and any option, is set as code."""
    pieces, end = [], 0
    shown = visible(text, limit)
    for found in _CODE.finditer(shown):
        pieces.append(escape(shown[end : found.start()]))
        pieces.append(Markup("<code>{}</code>").format(found[1] or found[2]))
        end = found.end()
    return Markup("").join([*pieces, escape(shown[end:])])


def _web_link(address: str) -> bool:
    """Whether text is an address that may become a link; anything else is shown as text."""
    return address.startswith("https://") and inert(address) == address and " " not in address


def _asset(name: str) -> Markup:
    """A style sheet or script of our own, put into the page as it is."""
    loader = _environment().loader
    assert loader is not None
    source, _, _ = loader.get_source(_environment(), name)
    return Markup(source)  # noqa: S704 - a file of this package


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(json_text: str) -> str:
    """JSON without ``<``, ``>`` and ``&`` needs no more quoting between tags."""
    if any(char in json_text for char in "<>&"):
        raise ValueError("this JSON is not quoted for a page")
    return json_text
