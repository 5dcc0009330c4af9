"""A comparison in rows and sentences, for every rendering of it."""

from __future__ import annotations

from dataclasses import dataclass

from recompute_scan.comparison import Calls, Comparison, Mark, Side, Switch
from recompute_scan.report.bars import Part, stacked
from recompute_scan.report.words import MECHANISM_WORDS
from recompute_scan.units import count, ms, pct, plural, times

_SAME_PCT = 0.05  # what one digit after the point shows as nothing


@dataclass(frozen=True)
class Change:
    """A list under one title: what went away, what is new, what is still there."""

    title: str
    items: tuple[str, ...]


def step_sentence(comparison: Comparison) -> str:
    """How the step changed, as time and, apart from it, as throughput."""
    before, after = comparison.before.step_ms, comparison.after.step_ms
    time, throughput = comparison.time_change_pct, comparison.throughput_change_pct
    if time is None or throughput is None:
        return "The step times cannot be compared: not both are known."
    if abs(time) < _SAME_PCT:
        return f"A step takes as long as before, {ms(after)}."
    more, other = ("more", "less") if time > 0 else ("less", "more")
    return (
        f"A step takes {ms(after)} instead of {ms(before)}: {pct(abs(time))} {more} time than "
        f"before. Put as throughput, it is {pct(abs(throughput))} {other}."
    )


@dataclass(frozen=True)
class Bar:
    """One step, drawn as its replays and the rest."""

    name: str
    total: str
    parts: tuple[Part, ...]


def step_bars(comparison: Comparison) -> tuple[Bar, ...]:
    """The two steps on one scale; empty where what replays take is not known of both."""
    sides = (("Before", comparison.before), ("After", comparison.after))
    scale = max(side.step_ms or 0.0 for _, side in sides)
    bars = []
    for name, side in sides:
        step, replays, surplus = side.step_ms, side.recompute_ms, side.surplus_recompute_ms
        if not step or replays is None or surplus is None or replays > step:
            return ()
        values = {"other": step - replays, "recompute": replays - surplus, "surplus": surplus}
        bars.append(Bar(name, ms(step), stacked(values, scale)))
    return tuple(bars)


def rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Label, before, after."""

    def row(label: str, one: str, other: str) -> tuple[str, str, str]:
        return label, one, other

    sides = comparison.before, comparison.after
    return [
        row("Verdict", *(side.verdict for side in sides)),
        row("Replays per layer", *(times(side.recompute_per_backward) for side in sides)),
        row("Mean over all work", *(times(side.mean_recompute) for side in sides)),
        row("Step time", *(ms(side.step_ms) for side in sides)),
        row("Replays a step", *(ms(side.recompute_ms) for side in sides)),
        row("Surplus among them", *(ms(side.surplus_recompute_ms) for side in sides)),
        row("Step time from", *(_source(side) for side in sides)),
    ]


def call_rows(comparison: Comparison) -> list[tuple[str, str, str, str, str]]:
    """Family; forward calls a step before and after; those run again before and after."""

    def cells(calls: Calls) -> tuple[str, str, str, str, str]:
        return (
            calls.family,
            _count(calls.forward_before),
            _count(calls.forward_after),
            _count(calls.recomputed_before),
            _count(calls.recomputed_after),
        )

    return [cells(calls) for calls in comparison.calls]


def changes(comparison: Comparison) -> list[Change]:
    """What went away, what is new and what is still there; lists with nothing are left out."""
    found = [
        Change(
            "Went away", _items(comparison.findings_gone, comparison.checkpoints_gone, "before")
        ),
        Change("New", _items(comparison.findings_new, comparison.checkpoints_new, "after")),
        Change("Still there", _items(comparison.findings_kept, comparison.checkpoints_kept, "")),
    ]
    return [change for change in found if change.items]


def _items(findings: tuple[Mark, ...], switches: tuple[Switch, ...], side: str) -> tuple[str, ...]:
    marks = [f"{mark.code} {mark.name}: {mark.title}" for mark in findings]
    return (*marks, *(_switch(switch, side) for switch in switches))


def _switch(switch: Switch, side: str) -> str:
    name = MECHANISM_WORDS.get(switch.mechanism or "", switch.mechanism or "a checkpoint")
    variant = f", {switch.variant}" if switch.variant else ""
    place = f" at {switch.call_site}" if switch.call_site else ""
    before, after = switch.blocks_before, switch.blocks_after
    if side or before == after:
        blocks = plural(before if side == "before" else after, "block")
    else:
        blocks = f"{plural(after, 'block')} instead of {count(before)}"
    return f"{name}{variant}{place}, round {blocks}"


def _source(side: Side) -> str:
    return {"timed": "timed steps", "trace": "the trace", None: "-"}[side.step_source]


def _count(value: float | None) -> str:
    return "-" if value is None else count(value)
