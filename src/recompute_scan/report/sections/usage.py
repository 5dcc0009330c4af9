"""The use of each operator and of the memory of one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.blocks import Page, Section, known
from recompute_scan.report.templating import visible
from recompute_scan.result import Result
from recompute_scan.result.watched_step import WatchedStep
from recompute_scan.units import ms, pct, plural, size

_TITLE = "Repeated and unused work"
_KINDS = {
    "repeated": "computed before in the step",
    "repeated-rows": "rows that the training forward computes too",
    "unread": "never read",
    "unread-gradient": "gradients that are never read",
    "unread-recompute": "recomputed, and never read",
    "between": "between checkpointed parts",
    "after-backward": "alive after the backward pass",
    "never-read": "never read by the backward pass",
}


def _lead(result: Result) -> str:
    watched = known(result.watched)
    if watched.untold is not None:
        return watched.untold
    spare = sum(one.ms for one in watched.work)
    kept = sum(one.bytes for one in watched.kept)
    said = [
        f"{plural(watched.operators, 'operator')} of one step took {ms(watched.ms)}: "
        f"{ms(watched.recomputed_ms)} in recomputes, {ms(spare)} repeated or unused."
    ]
    if watched.work or watched.kept:
        said.append(f"The step's own tensors took at most {size(watched.peak_bytes)}.")
    if kept:
        said.append(f"{size(kept)} were kept after their last use.")
    if watched.small_ms + watched.library_ms >= 0.01 * watched.ms:
        said.append(
            f"Not listed: {ms(watched.small_ms)} in small pieces and {ms(watched.library_ms)} "
            "inside installed packages."
        )
    if watched.hidden is not None:
        said.append(f"Unread results could not be found: {watched.hidden}")
    return " ".join(said)


def _bars(watched: WatchedStep) -> list[tuple[str, float, str]]:
    """The step's time in parts: name, share in percent, time."""
    twice = sum(one.ms for one in watched.work if one.kind.startswith("repeated"))
    unused = sum(one.ms for one in watched.work) - twice
    tail = sum(one.ms for one in watched.work if one.kind == "unread-recompute")
    again = max(watched.recomputed_ms - tail, 0.0)
    needed = max(watched.ms - twice - unused - again, 0.0)
    parts = {"needed": needed, "recomputed": again, "repeated": twice, "unused": unused}
    total = watched.ms or 1.0
    return [(name, 100 * part / total, ms(part)) for name, part in parts.items() if part > 0]


def _html(result: Result) -> Mapping[str, Any]:
    watched = known(result.watched)
    return {
        "bars": _bars(watched),
        "work": [
            (
                one.line or one.module_class,
                _KINDS[one.kind],
                one.same_as,
                str(one.operators),
                ms(one.ms),
                pct(100 * one.share),
            )
            for one in watched.work
        ],
        "kept": [
            (one.line or one.module_class, _KINDS[one.kind], one.holder, size(one.bytes))
            for one in watched.kept
        ],
    }


def _text(page: Page, result: Result) -> None:
    watched = known(result.watched)
    page.title(_TITLE)
    page.prose(_lead(result))
    for one in watched.work:
        page.prose(f"{pct(100 * one.share)} {_KINDS[one.kind]}: {visible(one.line, 200)}")
    for kept in watched.kept:
        page.prose(f"{size(kept.bytes)} {_KINDS[kept.kind]}: {visible(kept.line, 200)}")


EARNS = Section(
    anchor="earns",
    title=_TITLE,
    template="earns.html",
    present=lambda result: result.watched is not None,
    html=_html,
    lead=_lead,
    text=_text,
    link="Work",
)
