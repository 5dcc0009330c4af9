"""The breakdowns of Holistic Trace Analysis, beside what is counted here of the same trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section, analysed
from recompute_scan.result import Hta, Result
from recompute_scan.units import ms, pct

_COLUMNS = ("HTA", "recompute-scan")
_SAYS = (
    "Over all recorded steps. Every kernel that is neither communication nor a copy counts as "
    "computing."
)
# A table's first column on a terminal; two of 16 are beside it.
_WIDEST_LABEL = 46


def _title(result: Result) -> str:
    """``Holistic Trace Analysis``, with whose breakdown it is where there are several."""
    if result.hta is None or result.hta.rank is None or len(result.ranks) < 2:
        return "Holistic Trace Analysis"
    return f"Holistic Trace Analysis of rank {result.hta.rank}"


def _rows(hta: Hta) -> list[tuple[str, str, str]]:
    """What Holistic Trace Analysis found, and what recompute-scan counts of the same."""
    own = hta.own
    parts = [
        ("Idle", hta.idle_pct, own.idle_pct if own else None),
        ("Computing", hta.compute_pct, own.compute_pct if own else None),
        ("Busy without computing", hta.non_compute_pct, own.non_compute_pct if own else None),
        ("Communication beside computation", hta.overlap_pct, own.overlap_pct if own else None),
    ]
    whole = ms(own.kernel_time_ms) if own else ""
    return [
        ("GPU time, first kernel to last", ms(hta.kernel_time_ms), whole),
        *((name, pct(theirs), pct(ours) if own else "") for name, theirs, ours in parts),
        *(
            (f"Kernels: {visible(kind, 60)}", pct(part), "")
            for kind, part in list(hta.kernel_types.items())[:20]
        ),
    ]


def _html(result: Result) -> Mapping[str, Any]:
    assert result.hta is not None
    return {"rows": _rows(result.hta), "columns": _COLUMNS, "says": _SAYS}


def _text(page: Page, result: Result) -> None:
    assert result.hta is not None
    page.title(_title(result))
    page.prose(_SAYS)
    page.written.append("")
    for label, *values in [("", *_COLUMNS), *_rows(result.hta)]:
        line = f"  {label[:_WIDEST_LABEL]:<{_WIDEST_LABEL}}" + "".join(f"{v:>16}" for v in values)
        page.written.append(line.rstrip())


def _markdown(result: Result) -> str:
    assert result.hta is not None
    rows = [
        f"| {markdown_prose(name)} | {value} | {own} |" for name, value, own in _rows(result.hta)
    ]
    head = [f"| | {' | '.join(_COLUMNS)} |", "| --- | ---: | ---: |"]
    return "\n\n".join([f"#### {_title(result)}", _SAYS, "\n".join([*head, *rows])])


SECTION = Section(
    anchor="hta",
    title=_title,
    template="hta_figures.html",
    present=lambda result: analysed(result) and result.hta is not None,
    html=_html,
    text=_text,
    markdown=_markdown,
)
