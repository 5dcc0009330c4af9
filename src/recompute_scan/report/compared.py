"""A comparison in rows and sentences, and as a page and for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from recompute_scan import units
from recompute_scan.frameworks.registry import find_title
from recompute_scan.report.blocks import Page, wrap
from recompute_scan.report.figures import BarPart, stacked
from recompute_scan.report.templating import fill, visible
from recompute_scan.report.words import family_words
from recompute_scan.result.compare import Comparison, FamilyCalls, Mark, Side, Switch
from recompute_scan.units import count, ms, pct, plural, times

_SAME_PCT = 0.05  # what one digit after the point shows as nothing


class ComparedChange(Struct, frozen=True):
    """A list under one title: what went away, what is new, what is still there."""

    title: str
    items: tuple[str, ...]


def step_sentence(comparison: Comparison) -> str:
    """How the step changed, as time and as throughput; only what is sure."""
    before, after = comparison.before.step_ms, comparison.after.step_ms
    time, throughput = comparison.time_change_pct, comparison.throughput_change_pct
    if comparison.obstacles:
        return "The step times cannot be compared."
    if time is None or throughput is None:
        return "The step times cannot be compared: not both are known."
    spread = f"{span(comparison.before)} before, {span(comparison.after)} after"
    if abs(time) < _SAME_PCT:
        within = f"; the step times lie at {spread}" if comparison.difference else ""
        return f"The median step takes as long as before, {ms(after)}{within}."
    more, other = ("more", "less") if time > 0 else ("less", "more")
    change = f"A step takes {ms(after)} instead of {ms(before)}"
    if comparison.difference == "none":
        return (
            f"{change}, which lies within the spread of the step times ({spread}): whether it "
            "takes more or less time than before is not known."
        )
    if comparison.difference == "direction":
        return (
            f"A step takes {more} time than before, {ms(after)} instead of {ms(before)}; the step "
            f"times vary too much for a percentage ({spread})."
        )
    said = f"{change}: {pct(abs(time))} {more} time, {pct(abs(throughput))} {other} throughput."
    if comparison.difference is None:
        said += " An interval needs at least six steps of each side."
    return said


def cautions(comparison: Comparison) -> tuple[str, ...]:
    """The warnings that are no obstacles."""
    return tuple(w for w in comparison.warnings if w not in comparison.obstacles)


class StepBar(Struct, frozen=True):
    """One step, drawn as its recomputes and the rest."""

    name: str
    total: str
    parts: tuple[BarPart, ...]


def step_bars(comparison: Comparison) -> tuple[StepBar, ...]:
    """The two steps on one scale; empty where what recomputes take is not known of both, or where
    they cannot be compared.
    """
    if comparison.obstacles:
        return ()
    sides = (("Before", comparison.before), ("After", comparison.after))
    scale = max(side.step_ms or 0.0 for _, side in sides)
    bars = []
    for name, side in sides:
        step, recomputes, redundant = side.step_ms, side.recompute_ms, side.redundant_recompute_ms
        if not step or recomputes is None or redundant is None or recomputes > step:
            return ()
        values = {
            "other": step - recomputes,
            "recompute": recomputes - redundant,
            "redundant": redundant,
        }
        bars.append(StepBar(name, ms(step), stacked(values, scale)))
    return tuple(bars)


def rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Label, before, after."""

    def row(label: str, one: str, other: str) -> tuple[str, str, str]:
        return label, one, other

    sides = comparison.before, comparison.after
    return [
        row("Verdict", *(side.verdict for side in sides)),
        row("Recomputes per layer", *(times(side.recompute_per_backward) for side in sides)),
        row("Mean over all work", *(times(side.mean_recompute) for side in sides)),
        row("Step time", *(ms(side.step_ms) for side in sides)),
        row("Likely", *(span(side) for side in sides)),
        row("Step time from", *(_source(side) for side in sides)),
        row("Recomputes per step", *(ms(side.recompute_ms) for side in sides)),
        row("Redundant among them", *(ms(side.redundant_recompute_ms) for side in sides)),
    ]


def call_rows(comparison: Comparison) -> list[tuple[str, str, str, str, str]]:
    """Family; forward calls per step before and after; those run again before and after."""

    def cells(calls: FamilyCalls) -> tuple[str, str, str, str, str]:
        return (
            family_words(calls.family),
            _count(calls.forward_before),
            _count(calls.forward_after),
            _count(calls.recomputed_before),
            _count(calls.recomputed_after),
        )

    return [cells(calls) for calls in comparison.calls]


def changes(comparison: Comparison) -> list[ComparedChange]:
    """The lists of a comparison: gone, new, still there; empty ones are left out."""
    titles = ("Went away", "New", "Still there")
    if not comparison.same_forward_work:  # of another model, nothing went away
        titles = ("Only before", "Only after", "In both")
    found = [
        ComparedChange(
            titles[0], _items(comparison.findings_gone, comparison.checkpoints_gone, "before")
        ),
        ComparedChange(
            titles[1], _items(comparison.findings_new, comparison.checkpoints_new, "after")
        ),
        ComparedChange(
            titles[2], _items(comparison.findings_kept, comparison.checkpoints_kept, "")
        ),
    ]
    return [change for change in found if change.items]


def _items(findings: tuple[Mark, ...], switches: tuple[Switch, ...], side: str) -> tuple[str, ...]:
    marks = [f"{mark.code} {mark.name}: {mark.title}" for mark in findings]
    return (*marks, *(_switch(switch, side) for switch in switches))


def _switch(switch: Switch, side: str) -> str:
    name = find_title(switch.mechanism) or switch.mechanism or "a checkpoint"
    variant = f", {switch.variant}" if switch.variant else ""
    place = f" at {switch.call_site}" if switch.call_site else ""
    before, after = switch.blocks_before, switch.blocks_after
    if side or before == after:
        blocks = plural(before if side == "before" else after, "block")
    else:
        blocks = f"{plural(after, 'block')} instead of {count(before)}"
    return f"{name}{variant}{place}, around {blocks}"


def span(side: Side) -> str:
    """``71.1 to 363.4 ms``: where the median of the side's steps lies."""
    return units.span(side.step_low_ms, side.step_high_ms)


def _source(side: Side) -> str:
    if side.step_source is None:
        return "-"
    if not side.steps:
        return {"timed": "timed steps", "trace": "the trace", "measured": "--verify"}[
            side.step_source
        ]
    number = plural(side.steps, "step")
    if side.step_source == "measured":
        return f"{number} of --verify"
    return f"{number}, {'timed' if side.step_source == 'timed' else 'traced'}"


def _count(value: float | None) -> str:
    return "-" if value is None else count(value)


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
        written += ["", "Calls per step that differ"]
        written.append(f"  {'':<24}{'forward':>16}{'run again':>22}")
        written += [
            f"  {visible(name, 24):<24}{_arrow(a, b):>16}{_arrow(c, d):>22}"
            for name, a, b, c, d in calls[:_MOST_CALLS]
        ]
        if len(calls) > _MOST_CALLS:
            written.append(f"  and {len(calls) - _MOST_CALLS} more families (see the JSON)")
    if notes := cautions(comparison):
        written += ["", "Note", *_list(notes)]
    return "\n".join(written) + "\n"


def render_comparison_answer(comparison: Comparison) -> str:
    """The changes, in at most 15 lines."""
    page = Page(color=False)
    for label, side in (("Before", comparison.before), ("After", comparison.after)):
        number = times(side.recompute_per_backward)
        page.cut(f"{label + ':':<8}{side.name}: {side.verdict}, {number} recomputes per layer", "")
    page.prose(step_sentence(comparison), "", most=3)
    said = [*comparison.obstacles, *cautions(comparison)]
    lists = [*changes(comparison), ComparedChange("Note", tuple(said))]
    # First the changes, then the first doubt.
    lines = [f"{one.title}: {item}" for one in lists[:-1] for item in one.items]
    shown = [*lines[: 3 if said else 4], *(f"{lists[-1].title}: {item}" for item in said[:1])]
    for line in shown:
        page.prose(line, "    ", "  ", most=2)
    if left := len(lines) + len(said) - len(shown):
        page.prose(f"and {left} more (-v)")
    return "\n".join(page.written) + "\n"


def _list(items: Sequence[str]) -> list[str]:
    return [line for item in items for line in wrap(visible(item, 400), "    ", "  - ")]


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def render_comparison_html(comparison: Comparison) -> str:
    """The page; the same comparison gives the same text."""
    return fill(
        "compare.html",
        comparison=comparison,
        sentence=step_sentence(comparison),
        bars=step_bars(comparison),
        redundant=any(s.redundant_recompute_ms for s in (comparison.before, comparison.after)),
        rows=rows(comparison),
        changes=changes(comparison),
        cautions=cautions(comparison),
        calls=call_rows(comparison),
    )
