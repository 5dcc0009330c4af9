"""A scan in a notebook: verdict, three numbers, checkpoint call sites and what to change."""

from __future__ import annotations

from recompute_scan.report import summary
from recompute_scan.report.groups import checkpoint_stacks
from recompute_scan.report.html import fill_part
from recompute_scan.result import Result

# Arrangements and findings that are shown; the page has the others.
_MOST = 4


def render_brief_html(result: Result) -> str:
    """An HTML fragment without script and style; every name in it is escaped."""
    return fill_part(
        "brief.html",
        result=result,
        numbers=summary.key_numbers(result),
        stacks=checkpoint_stacks(result.regions),
        most=_MOST,
    )
