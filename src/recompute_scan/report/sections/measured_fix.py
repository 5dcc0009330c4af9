"""What ``run --verify`` measured with the fix applied, beside what had been predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.measured import (
    measured_sentences,
    measured_title,
    plan_arm,
    predicted_plan,
    removed_words,
)
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section, analysed
from recompute_scan.report.summary import predicted_beside
from recompute_scan.result import Arm, Result, Verified
from recompute_scan.units import UNKNOWN, ms, size, span, times

# Columns that a terminal has room for; more go into a second table.
_MOST_COLUMNS = 3
_NOTHING = "-"


class _Table(Struct, frozen=True):
    """Columns from the unchanged script on; each row has a label and one cell a column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def _table(result: Result, verified: Verified) -> _Table:
    """The measured figures side by side, the prediction among them."""
    arms = [("Unchanged", verified.before)]
    arms += [("With the fix", verified.after)] if verified.after else []
    arms += [("With the plan", plan)] if (plan := plan_arm(verified)) else []
    without = verified.without_checkpointing
    arms += [("No checkpoints", without)] if without else []
    measured = [arm for _, arm in arms]
    rows = [
        _row("Step time", measured, lambda arm: ms(arm.step_ms)),
        _row("Likely between", measured, lambda arm: span(arm.step_low_ms, arm.step_high_ms)),
        _predicted(result, verified, measured),
        _bytes("GPU memory, allocated", measured, lambda arm: arm.peak_allocated_bytes),
        _bytes("GPU memory, reserved", measured, lambda arm: arm.peak_reserved_bytes),
        _bytes("Process memory", measured, lambda arm: arm.peak_rss_bytes),
        _row("Recomputes per layer", measured, lambda arm: times(arm.recompute_per_backward)),
    ]
    return _Table(tuple(name for name, _ in arms), tuple(row for row in rows if row))


def _row(
    label: str, arms: list[Arm], cell: Callable[[Arm], str]
) -> tuple[str, tuple[str, ...]] | None:
    cells = tuple(cell(arm) if arm.status == "measured" else _NOTHING for arm in arms)
    return (label, cells) if any(text not in (UNKNOWN, _NOTHING) for text in cells) else None


def _bytes(
    label: str, arms: list[Arm], value: Callable[[Arm], int | None]
) -> tuple[str, tuple[str, ...]] | None:
    return _row(label, arms, lambda arm: size(value(arm)))


def _predicted(
    result: Result, verified: Verified, arms: list[Arm]
) -> tuple[str, tuple[str, ...]] | None:
    predicted, plan = predicted_beside(result), predicted_plan(result)

    def cell(arm: Arm) -> str:
        if arm is verified.after and predicted:
            return ms(predicted.after_ms)
        return ms(plan.step_ms) if arm is plan_arm(verified) and plan else _NOTHING

    return _row("Predicted", arms, cell)


def _removed(verified: Verified) -> list[str]:
    """The checkpoints that were taken out in memory."""
    return [removed_words(checkpoint) for checkpoint in verified.removed]


def _html(result: Result) -> Mapping[str, Any]:
    assert result.verified is not None
    return {
        "table": _table(result, result.verified),
        "sentences": measured_sentences(result),
        "removed": _removed(result.verified),
    }


def _text(page: Page, result: Result) -> None:
    assert result.verified is not None
    table = _table(result, result.verified)
    page.title(measured_title(result))
    opening, *others = measured_sentences(result)
    page.prose(opening)
    for removed in _removed(result.verified):
        page.prose(f"Taken out: {visible(removed, 300)}", "    ", "  ")
    page.written.append("")
    rows = [("", table.columns), *table.rows]
    for first in range(0, len(table.columns), _MOST_COLUMNS):
        for label, cells in rows:
            shown = cells[first : first + _MOST_COLUMNS]
            page.written.append(f"  {label:<21}" + "".join(f"{cell:>19}" for cell in shown))
        page.written.append("")
    for sentence in others:
        page.prose(sentence)


def _markdown(result: Result) -> str:
    assert result.verified is not None
    table = _table(result, result.verified)
    first, *others = measured_sentences(result)
    rows = [f"| {label} | {' | '.join(cells)} |" for label, cells in table.rows]
    head = f"| | {' | '.join(table.columns)} |"
    taken = [f"- {markdown_prose(removed[:300])}" for removed in _removed(result.verified)]
    parts = [
        f"#### {measured_title(result)}",
        markdown_prose(first),
        "\n".join(["Taken out in memory:", "", *taken]) if taken else "",
        "\n".join([head, "| --- |" + " ---: |" * len(table.columns), *rows]),
        markdown_prose(" ".join(others)),
    ]
    return "\n\n".join(part for part in parts if part)


SECTION = Section(
    anchor="measured",
    title=measured_title,
    template="measured_fix.html",
    present=lambda result: analysed(result) and result.verified is not None,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Measured",
)
