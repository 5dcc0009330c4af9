"""RS007 and RS010 to RS012: checkpoints in compiled code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from recompute_scan.findings.base import Evidence, NotApplicable, Rule
from recompute_scan.result import CompiledGraph, CompiledRecompute, Finding
from recompute_scan.units import plural

_WHAT_TO_TRY = (
    "To count, record with `recompute-scan run`, which keeps the compiler's graphs (torch 2.10 and "
    "newer). If that is not possible, set TORCH_COMPILE_DISABLE=1: the checkpoints are the "
    "same, and every operator shows."
)
# https://github.com/pytorch/pytorch/issues/190758, open; torch 2.13 does so.
_NEW_NUMBERS = (
    "The compiler's memory budget was {budget}. Below 1 it may run operators again that draw "
    "random numbers, and then draws others: gradients through dropout are wrong (pytorch/pytorch "
    "issue 190758). Set torch._functorch.config.activation_memory_budget to 1.0 where anything in "
    "the model draws random numbers."
)


@partial(Rule, "RS007", "compiled-recompute", needs="nothing")
def compiled_recompute(evidence: Evidence) -> Iterator[Finding]:
    """Part of the backward pass is compiled, and what it recomputes cannot be counted."""
    if not evidence.has_backward:
        raise NotApplicable("The trace shows no autograd nodes, so no compiled ones.")
    compiled = evidence.compiled
    if compiled is None:
        return
    share = f"{100 * compiled.share:.0f} % of the backward pass is compiled"
    again = evidence.compiled_calls_again
    if compiled.recomputes:
        title = f"{share} and runs forward work again that this trace cannot count"
        detail = (
            "Forward operators run inside compiled backward code, because of a checkpoint in it or "
            "by the compiler's own choice. The trace does not show how often, or in which layers."
        )
    else:
        title = f"{share}: what the compiler recomputes there cannot be seen"
        detail = (
            "A compiled backward holds gradients and recomputed forward work in one graph, and "
            "often in one kernel. Nothing shows that it recomputes more than a compiler always "
            "does, and nothing rules it out."
        )
    if again:
        detail += (
            " Recomputes by checkpoints around compiled code are counted. Any inside it are not."
        )
    budget = evidence.environment.get("activation_memory_budget")
    if budget:
        detail += f" {_NEW_NUMBERS.format(budget=budget)}"
    yield compiled_recompute.finding(
        evidence,
        severity="warning" if budget or (compiled.recomputes and again) else "info",
        title=title,
        detail=f"{detail} {_WHAT_TO_TRY}",
        evidence=(
            f"{plural(compiled.nodes, 'compiled node')} in the backward pass",
            *([f"{plural(again, 'compiled call')} ran again outside these nodes"] if again else []),
            *_attention(evidence),
        ),
    )


def _attention(evidence: Evidence) -> tuple[str, ...]:
    """The counts of attention's kernels, where there are any."""
    if evidence.attention_kernels is None:
        return ()
    backward, again = evidence.attention_kernels
    return (f"attention kernels: {backward} backward, {again} forward ones that ran again",)


# Text that torch adds to the reason of a break inside an operator that takes functions
# (torch/_dynamo/exc.py; seen on torch 2.13).
_INSIDE = re.compile(r"Higher Order Operator: torch\.utils\.checkpoint\b")
_PLACE = re.compile(r"Graph break in user code at (.{1,1000}:\d+)")
_REASON = re.compile(r"Graph Break Reason: .{0,500}:[^\S\n]*\n\s*(\S.{0,200})")


def _recomputes(evidence: Evidence) -> list[tuple[CompiledGraph, CompiledRecompute]]:
    """Operators that run again, each with its graph."""
    graphs = evidence.graphs.graphs if evidence.graphs else ()
    return [(graph, one) for graph in graphs for one in graph.recomputes]


def _place(graph: CompiledGraph, one: CompiledRecompute) -> str:
    """One line on what runs again, and where."""
    module = f" in {one.module}" if one.module else ""
    source = f" at {one.source}" if one.source else ""
    return f"graph {graph.name}: {one.operators} x {one.operator}{module}{source}"


@partial(Rule, "RS010", "graph-break-in-checkpoint", needs="graphs")
def graph_break(evidence: Evidence) -> Iterator[Finding]:
    """The compiler could not trace a checkpointed function to its end, and left it to Python."""
    found: dict[str, str] = {}
    for text in evidence.graphs.graph_breaks if evidence.graphs else ():
        place, reason = _PLACE.search(text), _REASON.search(text)
        if _INSIDE.search(text) and place is not None:
            found.setdefault(place[1], reason[1] if reason else "the log gives no reason")
    for at, why in found.items():
        yield graph_break.finding(
            evidence,
            title=f"The compiler leaves a checkpointed function at {at}",
            detail=(
                "A graph break inside a checkpointed function takes the whole function out of the "
                "graph: it runs in Python, uncompiled, in the forward pass and in each recompute. "
                "Remove what breaks the graph, or move it out of the checkpointed function."
            ),
            evidence=(f"{at}: {why}",),
        )


@partial(
    Rule,
    "RS011",
    "budget-recomputes-random",
    severity="error",
    needs="graphs",
    wrong_gradients=True,
)
def budget_recomputes_random(evidence: Evidence) -> Iterator[Finding]:
    """The compiler runs random operators again without the state that they drew from."""
    redrawn = [each for each in _recomputes(evidence) if each[1].redrawn]
    if not redrawn:
        return
    budgets = [graph.memory_budget for graph, _ in redrawn if graph.memory_budget is not None]
    lowered = f" The memory budget was {min(budgets):g}." if budgets else ""
    number = sum(one.operators for _, one in redrawn)
    yield budget_recomputes_random.finding(
        evidence,
        title=f"The compiler repeats {plural(number, 'random operator')} with other numbers",
        detail=(
            "The backward graph runs them again without the random state of their first run, "
            "so that gradients belong to another mask than the forward pass used (pytorch "
            f"issue 190758).{lowered} Set torch._functorch.config.activation_memory_budget to "
            "1.0 where anything in the model draws random numbers."
        ),
        evidence=tuple(_place(*each) for each in redrawn[:8]),
    )


@partial(Rule, "RS012", "expensive-node-recomputed", needs="graphs")
def expensive_node_recomputed(evidence: Evidence) -> Iterator[Finding]:
    """The compiler runs products or attention again, and no checkpoint asks for it."""
    costly = [
        (graph, one)
        for graph, one in _recomputes(evidence)
        if one.why != "checkpoint" and not one.free
    ]
    if not costly:
        return
    number = sum(one.operators * one.times for _, one in costly)
    budgets = [graph.memory_budget for graph, _ in costly if graph.memory_budget is not None]
    because = (
        f"The memory budget of {min(budgets):g} asks for it: below 1 the compiler keeps fewer "
        "results and works out the rest again. Where the device has memory left, set "
        "torch._functorch.config.activation_memory_budget closer to 1.0."
        if budgets and min(budgets) < 1
        else "No checkpoint and no known memory budget asks for it."
    )
    yield expensive_node_recomputed.finding(
        evidence,
        title=f"The compiler runs {plural(number, 'costly operator')} again by its own choice",
        detail=f"They take as long as in the forward pass, unlike fused operators. {because}",
        evidence=tuple(_place(*each) for each in costly[:8]),
    )
