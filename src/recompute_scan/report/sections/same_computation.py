"""Whether each recompute was the computation of its forward, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.faithful import ComparedRegion, Fidelity
from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.result import Result
from recompute_scan.units import UNKNOWN, plural

_TITLE = "Is the recomputed forward the same?"
_MOST_ROWS = 200


def _differs(region: ComparedRegion) -> bool:
    wrong = any(one.kind != "atomics" for one in region.differences)
    return wrong or bool(region.lost)


def _updates(region: ComparedRegion) -> bool:
    return any(state.is_buffer for state in region.states)


def _undecided(region: ComparedRegion) -> bool:
    return any(one.kind == "atomics" for one in region.differences) or bool(region.untold)


def _lead(fidelity: Fidelity) -> str:
    """The answer, one or two sentences."""
    blocks = fidelity.compared
    if not blocks:
        why = fidelity.untold or next(
            (why for region in fidelity.regions for why in region.untold), None
        )
        return f"Not compared: {why}" if why else "Not compared: no recompute ran in that step."
    differing = [region for region in blocks if _differs(region)]
    updating = [region for region in blocks if _updates(region) and not _differs(region)]
    of = f"of {plural(len(blocks), 'block')}"
    if differing:
        return (
            f"No: the recomputes of {len(differing)} {of} are another computation than their "
            "forward, so that gradients are wrong. The findings say where."
        )
    if updating:
        return (
            f"Their results are, and yet the recomputes of {len(updating)} {of} update buffers "
            "that the forward has updated already."
        )
    undecided = [region for region in blocks if _undecided(region)]
    if undecided:
        return (
            f"That could not be told of {len(undecided)} {of}: the same call gives another result "
            "each time on this device, or the block could not be looked at."
        )
    compared = plural(sum(region.operators for region in blocks), "result")
    if any(region.rounding for region in blocks):
        return f"Yes, up to rounding: {compared} {of} were compared."
    return f"Yes, to the last bit: {compared} {of} were compared."


def _answer(region: ComparedRegion) -> str:
    said = []
    for one in region.differences:
        name = visible(one.operation.name, 80)
        said.append(
            f"{name} gives another result each time it is called"
            if one.kind == "atomics"
            else f"differs from {name} on"
        )
    said += [f"{visible(one.name or 'a tensor', 80)} gets no gradient" for one in region.lost]
    said += [f"updates {visible(one.name, 80)} again" for one in region.states if one.is_buffer]
    said += [visible(why, 200) for why in region.untold]
    # What Python code counts: no gradient hangs on it unless the block reads it, which would show.
    counted = [
        f"sets {visible(one.name, 80)} again: {visible(one.before, 20)}, then "
        f"{visible(one.forward, 20)}, then {visible(one.recompute, 20)}"
        for one in region.states
        if not one.is_buffer
    ]
    if not said:
        rounding = f" up to rounding ({region.rounding:.1e})" if region.rounding else ""
        said = [f"the same{rounding}"]
    return "; ".join(dict.fromkeys([*said, *counted]))


def _rows(fidelity: Fidelity) -> list[tuple[str, str, str, str, str]]:
    ordered = sorted(fidelity.compared, key=lambda one: (not _differs(one), not _updates(one)))
    return [
        (
            one.module or one.module_class or UNKNOWN,
            one.variant,
            str(one.operators),
            str(one.random_operators),
            _answer(one),
        )
        for one in ordered[:_MOST_ROWS]
    ]


def _html(result: Result) -> Mapping[str, Any]:
    fidelity = result.fidelity
    return {
        "lead": _lead(fidelity) if fidelity else "",
        "rows": _rows(fidelity) if fidelity else [],
    }


def _text(page: Page, result: Result) -> None:
    if result.fidelity is not None:
        page.title(_TITLE)
        page.prose(_lead(result.fidelity))


def _markdown(result: Result) -> str:
    if result.fidelity is None:
        return ""
    return f"#### {_TITLE}\n\n{markdown_prose(_lead(result.fidelity))}"


SECTION = Section(
    anchor="same",
    title=_TITLE,
    template="same_computation.html",
    present=lambda result: result.fidelity is not None,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Same?",
    help=(
        "Is the recomputed forward the same?",
        "compares one step's recomputes with their forward, operator by operator: a recompute "
        "that draws other random numbers, or takes another branch, gives wrong gradients.",
    ),
)
