"""The proof: one block, its forward pass and each recompute side by side, and the plain count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.attachments import proof_trace
from recompute_scan.report.section import Section, analysed
from recompute_scan.report.side_by_side import family_table, timeline
from recompute_scan.report.words import COLUMNS, HOW, plain_count_table
from recompute_scan.result import Result


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "proof": timeline(result),
        "families": family_table(result.proof) if result.proof else [],
        "excerpt": proof_trace(result.proof) if result.proof else "",
        "plain_rows": plain_count_table(result),
        "plain_columns": COLUMNS,
        "plain_how": HOW,
    }


def _title(result: Result) -> str:
    drawn = result.proof is not None and bool(result.proof.lanes)
    return "The proof: one block, run by run" if drawn else "The count that anyone can redo"


def _present(result: Result) -> bool:
    drawn = result.proof is not None and bool(result.proof.lanes)
    return analysed(result) and (drawn or bool(plain_count_table(result)))


SECTION = Section(
    anchor="proof",
    title=_title,
    template="run_by_run.html",
    present=_present,
    html=_html,
    link="Proof",
    help=(
        "The proof",
        "puts the runs of one block under one another: what ran in the forward pass, and what of "
        "it ran again in each recompute. `Enlarge` widens the drawing.",
    ),
)
