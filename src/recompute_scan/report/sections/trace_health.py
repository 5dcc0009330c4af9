"""Trace health and environment: what is worth knowing, what was repaired, versions and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.escape import markdown_code, markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section, always
from recompute_scan.result import Result

_MOST_NOTES = 10
# Versions and settings that decide how a case is read; the rest stays in the report.
_MOST_ENVIRONMENT = 12


def _counters(result: Result) -> list[tuple[str, int]]:
    """What was repaired, dropped or missing, in words; the plain number of events is neither."""
    return [
        (name.replace("_", " "), number)
        for name, number in result.health.items()
        if number and name != "events"
    ]


def _html(result: Result) -> Mapping[str, Any]:
    return {"counters": _counters(result)}


def _text(page: Page, result: Result) -> None:
    notes = list(result.warnings)
    notes += [
        f"{rule.code} could not be checked: {rule.why or 'no reason given'}"
        for rule in result.checked
        if rule.status == "error"
    ]
    if not notes:
        return
    page.title("Worth knowing")
    for note in notes[:_MOST_NOTES]:
        page.prose(f"- {visible(note, 300)}", "    ", "  ")
    if len(notes) > _MOST_NOTES:
        page.prose(f"and {len(notes) - _MOST_NOTES} more (see the report)")


def _markdown(result: Result) -> str:
    notes = [f"- {markdown_prose(note[:600])}" for note in result.warnings]
    notes += [f"- {markdown_code(name)}: {number}" for name, number in _counters(result)]
    worth_knowing = "\n".join(["#### Worth knowing", "", *notes]) if notes else ""
    return "\n\n".join(part for part in (worth_knowing, _environment(result)) if part)


def _environment(result: Result) -> str:
    shown = list(result.environment.items())[:_MOST_ENVIRONMENT]
    rows = [f"| {markdown_code(name, 60)} | {markdown_code(value)} |" for name, value in shown]
    if not rows:
        return ""
    table = "\n".join(["| | |", "| --- | --- |", *rows])
    return f"<details><summary>Environment</summary>\n\n{table}\n\n</details>"


SECTION = Section(
    anchor="health",
    title="Trace health and environment",
    template="trace_health.html",
    present=always,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Health",
)
