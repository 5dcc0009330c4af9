"""Sections on the run: ranks, health of the trace, memory snapshots, unused work."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from msgspec import Struct

from recompute_scan.report.blocks import Page, Section, always, analysed, known, ranges
from recompute_scan.report.summary import ranks_sentence
from recompute_scan.report.templating import markdown_code, markdown_list, visible
from recompute_scan.result import MemorySnapshot, Rank, Result, Verdict
from recompute_scan.result.watched_step import WatchedStep
from recompute_scan.units import UNKNOWN, ms, pct, plural, size

# From here on the rows of single ranks are folded away under their groups.
MANY_RANKS = 16
MOST_RANKS = 2048


class RankGroup(Struct, frozen=True):
    """Ranks with the same verdict and the same number of recomputes a block."""

    verdict: Verdict
    recomputes: float | None
    ranks: tuple[Rank, ...]

    @property
    def numbers(self) -> str:
        """``0-3, 8``."""
        return ranges(sorted(rank.rank for rank in self.ranks))

    @property
    def step(self) -> str:
        """The median step, and the shortest and longest where there are several."""
        times = [rank.step_ms for rank in self.ranks if rank.step_ms is not None]
        if not times:
            return UNKNOWN
        if len(times) == 1:
            return ms(times[0])
        return f"{ms(median(times))} ({ms(min(times))} to {ms(max(times))})"


def rank_groups(result: Result) -> tuple[RankGroup, ...]:
    """The groups, in order of their first rank."""
    groups: dict[tuple[Verdict, float | None], list[Rank]] = {}
    for rank in result.ranks:
        recomputes = rank.recomputes_per_block
        key = (rank.verdict, None if recomputes is None else round(recomputes, 2))
        groups.setdefault(key, []).append(rank)
    return tuple(
        RankGroup(verdict, recomputes, tuple(ranks))
        for (verdict, recomputes), ranks in groups.items()
    )


RANK_BY_RANK = Section(
    anchor="ranks",
    title="Rank by rank",
    template="rank_by_rank.html",
    present=lambda result: analysed(result) and len(result.ranks) > 1,
    html=lambda result: {
        "groups": rank_groups(result),
        "sentence": ranks_sentence(result),
        "many_ranks": MANY_RANKS,
        "most_ranks": MOST_RANKS,
    },
    link="Ranks",
)


_MOST_NOTES = 10
# Versions and settings that decide how a case is read; the rest stays in the report.
_MOST_ENVIRONMENT = 12


def _trace_health_text(page: Page, result: Result) -> None:
    notes = list(result.warnings)
    notes += [
        f"{rule.code} could not be checked: {rule.why or 'no reason given'}"
        for rule in result.checked
        if rule.status == "error"
    ]
    if not notes:
        return
    page.title("Note")
    for note in notes[:_MOST_NOTES]:
        page.prose(f"- {visible(note, 300)}", "    ", "  ")
    if len(notes) > _MOST_NOTES:
        page.prose(f"and {len(notes) - _MOST_NOTES} more (see the report)")


def _trace_health_markdown(result: Result) -> str:
    notes = markdown_list(note[:600] for note in result.warnings)
    parts = [f"#### Note\n\n{notes}"] if notes else []
    shown = list(result.environment.items())[:_MOST_ENVIRONMENT]
    each = [f"{markdown_code(name, 60)} {markdown_code(value)}" for name, value in shown]
    if each:
        about = ", ".join(each)
        parts.append(f"<details><summary>Environment</summary>\n\n{about}\n\n</details>")
    return "\n\n".join(parts)


TRACE_HEALTH = Section(
    anchor="health",
    title="Trace health and environment",
    template="trace_health.html",
    present=always,
    html=lambda result: {
        "counters": [
            (key.replace("_", " "), n) for key, n in result.health.items() if n and key != "events"
        ]
    },
    text=_trace_health_text,
    markdown=_trace_health_markdown,
    link="Trace",
)


_TITLE = "Who holds the peak?"
_KINDS = {
    "kept": "kept by a policy of a selective checkpoint",
    "checkpoint": "made inside checkpointed calls, and not freed with them",
    "recompute": "made by recomputes",
    "forward": "made by modules that are not checkpointed",
    "backward": "made by the backward pass (gradients, workspace)",
    "optimizer": "made by the optimizer",
    "other": "made by other code (weights, inputs)",
    "unknown": "without a stack",
}
_MOST_LINES = 5


def _lead(one: MemorySnapshot) -> str:
    name = visible(one.file, 120)
    kinds = "; ".join(f"{size(n)} {_KINDS.get(kind, kind)}" for kind, n in one.by_kind.items())
    history = "" if one.events else " It has no history, so the peak is its end."
    failed = f" {plural(one.out_of_memory, 'request')} failed." if one.out_of_memory else ""
    return (
        f"{name}, GPU {one.device}: {size(one.peak_bytes)} were in use at the peak, of "
        f"{size(one.reserved_bytes)} reserved at the end.{history}{failed} The peak: {kinds}."
    )


def _rows(one: MemorySnapshot) -> list[tuple[str, str, str, str]]:
    return [
        (each.site or UNKNOWN, _KINDS[each.kind], size(each.bytes), str(each.blocks))
        for each in one.held
    ]


def _memory_snapshots_text(page: Page, result: Result) -> None:
    page.title(_TITLE)
    for one in result.snapshots:
        page.prose(_lead(one))
        for site, kind, held, blocks in _rows(one)[:_MOST_LINES]:
            page.prose(f"{held} in {blocks} blocks, {kind}: {visible(site, 160)}", indent="    ")


MEMORY_SNAPSHOTS = Section(
    anchor="snapshots",
    title=_TITLE,
    template="memory_snapshots.html",
    present=lambda result: bool(result.snapshots),
    html=lambda result: {"rows": [_rows(one) for one in result.snapshots]},
    lead=lambda result: [_lead(one) for one in result.snapshots],
    text=_memory_snapshots_text,
    link="Snapshots",
    help=(
        _TITLE,
        "is read from a memory snapshot: what was in use when most was, by the line that asked.",
    ),
)


_WORK_TITLE = "Repeated and unused work"
_WORK_KINDS = {
    "repeated": "computed before in the step",
    "repeated-rows": "rows that another forward computes too",
    "unread": "never read",
    "unread-gradient": "gradients that are never read",
    "unread-recompute": "recomputed, and never read",
    "between": "between checkpointed parts",
    "after-backward": "alive after the backward pass",
    "never-read": "never read by the backward pass",
}


def _work_lead(result: Result) -> str:
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


def _work_bars(watched: WatchedStep) -> list[tuple[str, float, str]]:
    """The step's time in parts: name, share in percent, time."""
    twice = sum(one.ms for one in watched.work if one.kind.startswith("repeated"))
    unused = sum(one.ms for one in watched.work) - twice
    tail = sum(one.ms for one in watched.work if one.kind == "unread-recompute")
    again = max(watched.recomputed_ms - tail, 0.0)
    needed = max(watched.ms - twice - unused - again, 0.0)
    parts = {"needed": needed, "recomputed": again, "repeated": twice, "unused": unused}
    total = watched.ms or 1.0
    return [(name, 100 * part / total, ms(part)) for name, part in parts.items() if part > 0]


def _work_html(result: Result) -> Mapping[str, Any]:
    watched = known(result.watched)
    return {
        "bars": _work_bars(watched),
        "work": [
            (
                one.line or one.module_class,
                _WORK_KINDS[one.kind],
                one.same_as,
                str(one.operators),
                ms(one.ms),
                pct(100 * one.share),
                ms(one.most_ms),
            )
            for one in watched.work
        ],
        "kept": [
            (one.line or one.module_class, _WORK_KINDS[one.kind], one.holder, size(one.bytes))
            for one in watched.kept
        ],
    }


def _work_text(page: Page, result: Result) -> None:
    watched = known(result.watched)
    page.title(_WORK_TITLE)
    page.prose(_work_lead(result))
    for one in watched.work:
        page.prose(f"{pct(100 * one.share)} {_WORK_KINDS[one.kind]}: {visible(one.line, 200)}")
    for kept in watched.kept:
        page.prose(f"{size(kept.bytes)} {_WORK_KINDS[kept.kind]}: {visible(kept.line, 200)}")


EARNS = Section(
    anchor="earns",
    title=_WORK_TITLE,
    template="earns.html",
    present=lambda result: result.watched is not None,
    html=_work_html,
    lead=_work_lead,
    text=_work_text,
    link="Work",
)
