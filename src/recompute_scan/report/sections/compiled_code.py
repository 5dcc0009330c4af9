"""What compiled code runs again inside its own backward graphs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.result import CompiledCode, CompiledRecompute, Result
from recompute_scan.units import UNKNOWN, plural

_TITLE = "What compiled code runs again"
_MOST_ROWS = 200
_WHY = {
    "checkpoint": "a checkpoint in the compiled code",
    "compiler": "the compiler's own choice",
    "budget": "the memory budget",
}


def _lead(code: CompiledCode) -> str:
    """The answer, a few sentences."""
    broken = f"The compiler left code to Python {plural(len(code.graph_breaks), 'time')}."
    if not code.graphs and not code.unknown:
        return f"No compiled code has a backward pass. {broken}"
    if not code.graphs:
        names = visible(", ".join(code.unknown[:3]), 200)
        return f"Not known: the compiler's graphs for {names} are not here."
    every = sum(graph.operators for graph in code.graphs)
    free = sum(graph.free for graph in code.graphs)
    asked = sum(graph.recomputed for graph in code.graphs) - free
    graphs = plural(len(code.graphs), "compiled graph")
    said = (
        f"Of {plural(every, 'operator')} in {graphs}, the backward graphs run {asked} again for a "
        f"checkpoint's sake or at a price, and {free} for free: these are fused with what needs "
        "them and cost no traffic."
    )
    if code.unknown:
        said += f" The graphs for {visible(', '.join(code.unknown[:3]), 200)} are not here."
    if code.graph_breaks:
        said += f" {broken}"
    return said


def _row(graph: str, one: CompiledRecompute) -> tuple[str, ...]:
    why = _WHY[one.why] + (", free" if one.free else "")
    return (
        graph,
        one.operator + (" (random)" if one.random else ""),
        one.module or UNKNOWN,
        one.source or UNKNOWN,
        str(one.operators),
        str(one.times),
        why,
    )


def _html(result: Result) -> Mapping[str, Any]:
    code = result.compiled
    if code is None:
        return {"lead": "", "rows": [], "breaks": []}
    rows = [_row(graph.name, one) for graph in code.graphs for one in graph.recomputes]
    return {
        "lead": _lead(code),
        "rows": rows[:_MOST_ROWS],
        "breaks": [reason.partition("\n")[0] for reason in code.graph_breaks[:_MOST_ROWS]],
    }


def _text(page: Page, result: Result) -> None:
    if result.compiled is not None:
        page.title(_TITLE)
        page.prose(_lead(result.compiled))


def _markdown(result: Result) -> str:
    if result.compiled is None:
        return ""
    return f"#### {_TITLE}\n\n{markdown_prose(_lead(result.compiled))}"


SECTION = Section(
    anchor="compiled",
    title=_TITLE,
    template="compiled_code.html",
    present=lambda result: result.compiled is not None,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Compiled",
    help=(
        _TITLE,
        "lists what the compiler's graphs run again in their backward pass: for a checkpoint, for "
        "the memory budget, or because it is cheaper than to keep it.",
    ),
)
