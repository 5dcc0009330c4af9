"""Forward work that runs again because the model is written so, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.result import ByDesign, Result
from recompute_scan.units import ms, plural

_TITLE = "Recomputed by the model's own design"
_MOST_ROWS = 50
_MOST_NAMES = 3
_BESIDE = (
    "What else a function runs again of itself in its own gradient, as chunked losses and fused "
    "activations do, is its formula and not counted."
)


def _count(number: float) -> str:
    return f"{number:.0f}" if number == int(number) else f"{number:.1f}"


def _inside(one: ByDesign) -> str:
    names = [visible(name, 80) for name in one.inside[:_MOST_NAMES]]
    rest = len(one.inside) - len(names)
    said = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{said}, and {plural(rest, 'other')}" if rest else said


def _sentence(one: ByDesign) -> str:
    again, forward = _count(one.recomputed_per_step), _count(one.forward_per_step)
    took = ms(one.recompute_ms_per_step)
    if one.kernels_per_step:
        took = f"{_count(one.kernels_per_step)} kernels, {took}"
    if one.inside == (one.function,):
        return (
            f"{visible(one.function, 80)} runs its own block once more without gradients in "
            f"{again} of its gradients per step, as a reversible layer does to get its input back, "
            f"and then again with gradients, which is its one recompute ({took} for the former)."
        )
    return (
        f"{visible(one.function, 80)} runs {again} times again per step in the gradients of "
        f"{_inside(one)}, beside {forward} times in the forward pass ({took})."
    )


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "sentences": [_sentence(one) for one in result.by_design[:_MOST_ROWS]],
        "beside": _BESIDE,
    }


def _text(page: Page, result: Result) -> None:
    page.title(_TITLE)
    for one in result.by_design[:_MOST_ROWS]:
        page.prose(_sentence(one))
    page.prose(_BESIDE)


def _markdown(result: Result) -> str:
    said = [*(_sentence(one) for one in result.by_design[:_MOST_ROWS]), _BESIDE]
    return f"#### {_TITLE}\n\n" + "\n".join(f"- {markdown_prose(one)}" for one in said)


SECTION = Section(
    anchor="by-design",
    title=_TITLE,
    template="recomputed_by_design.html",
    present=lambda result: bool(result.by_design),
    html=_html,
    text=_text,
    markdown=_markdown,
    link="By design",
    help=(
        _TITLE,
        "lists functions whose forward other functions run again in their own gradients, and "
        "reversible layers, which run theirs once to get their input back: forward work that runs "
        "again without a checkpoint.",
    ),
)
