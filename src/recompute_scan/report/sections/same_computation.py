"""Whether each recompute was the computation of its forward, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.faithful import SAME, ComparedRegion, Fidelity, in_words
from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.result import Result
from recompute_scan.units import UNKNOWN, ms, plural

_MOST_ROWS = 200


def _answer(region: ComparedRegion) -> str:
    said = []
    for one in region.differences:
        name = visible(one.operation.name, 80)
        said.append(
            f"{name} gives another result each time it is called"
            if one.kind == "atomics"
            else f"differs from {name} on"
        )
    said += [
        f"{visible(one.name or 'a tensor', 80)} "
        + ("leaves without its gradient" if one.why == "left-without" else "gets no gradient")
        for one in region.lost
        if one.why in ("left-without", "grad-mode-off", "detached")
    ]
    said += ["the function passes on other gradients"] * region.passes_others
    said += [f"updates {visible(one.name, 80)} again" for one in region.states if one.is_buffer]
    said += [visible(why, 200) for why in region.untold]
    # What Python code counts: no gradient hangs on it unless the block reads it, which would show.
    counted = [
        f"changes {visible(one.name, 80)} again: {visible(one.before, 20)}, then "
        f"{visible(one.forward, 20)}, then {visible(one.recompute, 20)}"
        for one in region.states
        if not one.is_buffer
    ]
    if not said:
        rounding = f" up to rounding ({region.rounding:.1e})" if region.rounding else ""
        said = [f"the same{rounding}"]
    return "; ".join(dict.fromkeys([*said, *counted]))


def _rows(fidelity: Fidelity) -> list[tuple[str, str, str, str, str]]:
    ordered = sorted(fidelity.compared, key=lambda one: (not one.differs, not one.updates))
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


def _keeping(fidelity: Fidelity) -> str | None:
    """What keeping the random state takes, and whether anything needs it."""
    took = fidelity.keeping_ms
    if took is None:
        return None
    drawn = sum(region.random_operators for region in fidelity.compared)
    needs = (
        f"{plural(drawn, 'operator')} of the recomputes drew random numbers, and need it"
        if drawn
        else "no operator of the recomputes drew random numbers"
    )
    return (
        f"Keeping the random state takes about {ms(took)} per step where all of these checkpoints "
        f"do: {fidelity.keeping_us:.0f} µs of the host for each recompute. In this step {needs}."
    )


def _html(result: Result) -> Mapping[str, Any]:
    fidelity = result.fidelity
    return {
        "lead": in_words(fidelity) if fidelity else "",
        "rows": _rows(fidelity) if fidelity else [],
        "keeping": _keeping(fidelity) if fidelity else None,
    }


def _text(page: Page, result: Result) -> None:
    said = in_words(result.fidelity) if result.fidelity is not None else None
    if said is not None and said not in result.headline:
        page.title(SAME)
        page.prose(said)


def _markdown(result: Result) -> str:
    if result.fidelity is None:
        return ""
    return f"#### {SAME}\n\n{markdown_prose(in_words(result.fidelity))}"


SECTION = Section(
    anchor="same",
    title=SAME,
    template="same_computation.html",
    present=lambda result: result.fidelity is not None,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Same?",
    help=(
        SAME,
        "compares one step's recomputes with their forward, operator by operator: a recompute "
        "that draws other random numbers, or takes another branch, gives wrong gradients.",
    ),
)
