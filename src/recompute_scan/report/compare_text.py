"""A comparison for a terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.comparison import Comparison
from recompute_scan.report.compared import call_rows, cautions, changes, rows, step_sentence
from recompute_scan.report.escape import visible
from recompute_scan.report.page import wrap

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
    for change in changes(comparison):
        written += ["", change.title, *_list(change.items)]
    calls = call_rows(comparison)
    if calls:
        written += ["", "Calls a step that differ"]
        written.append(f"  {'':<24}{'forward':>16}{'run again':>22}")
        written += [
            f"  {visible(name, 24):<24}{_arrow(a, b):>16}{_arrow(c, d):>22}"
            for name, a, b, c, d in calls[:_MOST_CALLS]
        ]
        if len(calls) > _MOST_CALLS:
            written.append(f"  and {len(calls) - _MOST_CALLS} more families (see the JSON)")
    if notes := cautions(comparison):
        written += ["", "Worth knowing", *_list(notes)]
    return "\n".join(written) + "\n"


def _list(items: Sequence[str]) -> list[str]:
    return [line for item in items for line in wrap(visible(item, 400), "    ", "  - ")]


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"
