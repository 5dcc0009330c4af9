"""A comparison as one page that opens offline."""

from __future__ import annotations

from recompute_scan.comparison import Comparison
from recompute_scan.report.compared import (
    call_rows,
    cautions,
    changes,
    rows,
    step_bars,
    step_sentence,
)
from recompute_scan.report.html import fill


def render_comparison_html(comparison: Comparison) -> str:
    """The page; the same comparison gives the same text."""
    return fill(
        "compare.html",
        comparison=comparison,
        sentence=step_sentence(comparison),
        bars=step_bars(comparison),
        rows=rows(comparison),
        changes=changes(comparison),
        cautions=cautions(comparison),
        calls=call_rows(comparison),
    )
