"""Sections on correctness: fidelity, selective policies, compiled code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.blocks import Page, Section, known
from recompute_scan.report.templating import visible
from recompute_scan.result import CompiledRecompute, Result
from recompute_scan.result.fidelity import (
    SAME,
    ComparedRegion,
    DecidedOperator,
    Fidelity,
    WatchedPolicy,
    in_words,
)
from recompute_scan.units import UNKNOWN, ms, plural, size

_SAME_COMPUTATION_MOST_ROWS = 200


def _answer(region: ComparedRegion) -> str:
    said = []
    for one in region.differences:
        name = visible(one.operation.name, 80)
        said.append(
            f"{name} gives a different result at each call"
            if one.kind == "atomics"
            else f"differs at {name} and after it"
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
    # Counters of Python code: no gradient hangs on them unless the block reads them, which shows.
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
        for one in ordered[:_SAME_COMPUTATION_MOST_ROWS]
    ]


def _keeping(fidelity: Fidelity) -> str | None:
    """The time to keep the random state, and whether anything needs it."""
    took = fidelity.keeping_ms
    if took is None:
        return None
    drawn = sum(region.random_operators for region in fidelity.compared)
    needs = (
        f"{plural(drawn, 'operator')} of the recomputes drew random numbers: it is needed"
        if drawn
        else "no operator of the recomputes drew random numbers"
    )
    return (
        f"Keeping the random state in all these checkpoints takes about {ms(took)} per step: "
        f"{fidelity.keeping_us:.0f} µs of host time per recompute. In this step {needs}."
    )


def _same_computation_lead(result: Result) -> str:
    return in_words(known(result.fidelity))


def _same_computation_text(page: Page, result: Result) -> None:
    said = _same_computation_lead(result)
    if said not in result.headline:
        page.title(SAME)
        page.prose(said)


SAME_COMPUTATION = Section(
    anchor="same",
    title=SAME,
    template="same_computation.html",
    present=lambda result: result.fidelity is not None,
    html=lambda result: {
        "rows": _rows(known(result.fidelity)),
        "keeping": _keeping(known(result.fidelity)),
    },
    lead=_same_computation_lead,
    text=_same_computation_text,
    link="Fidelity",
    help=(
        SAME,
        "compares one step's recomputes with their forward, operator by operator: a recompute "
        "that draws other random numbers, or takes another branch, gives wrong gradients.",
    ),
)


_SELECTIVE_POLICIES_TITLE = "What do the policies keep?"
_MOST_POLICIES, _SELECTIVE_POLICIES_MOST_ROWS, _MOST_LINES = 20, 100, 4


def _sentence(policy: WatchedPolicy) -> str:
    name = visible(policy.name, 120)
    return (
        f"{name} was asked {plural(policy.met, 'time')} in {plural(policy.regions, 'region')}: it "
        f"kept {plural(policy.kept, 'result')}, {size(policy.kept_bytes)}."
    )


def _selective_policies_lead(result: Result) -> str:
    found = known(result.policies)
    if not found.policies:
        return "No policy was asked in the recorded step. " + " ".join(found.untold)
    return " ".join(["In one step:", *map(_sentence, found.policies[:_MOST_LINES]), *found.untold])


def _where(policy: WatchedPolicy) -> str:
    parts = [f"checkpoint: {visible(policy.site or UNKNOWN, 200)}"]
    if policy.defined:
        parts.insert(0, f"defined at {visible(policy.defined, 200)}")
    if policy.raised:
        parts.append(f"raised {plural(policy.raised, 'time')}")
    return "; ".join(parts)


def _selective_policies_row(policy: WatchedPolicy, one: DecidedOperator) -> tuple[str, ...]:
    by = [entry.collection for entry in policy.entries if entry.name == one.name]
    time = one.recompute_ms_per_step
    return (
        one.name,
        str(one.met),
        ", ".join(f"{name.lower().replace('_', ' ')} {n}" for name, n in one.decided.items()),
        ", ".join(by),
        size(one.kept_bytes) if one.kept else "",
        size(one.result_bytes) if one.kept < one.met else "",
        str(one.recomputed),
        ms(time) if time is not None else UNKNOWN,
    )


def _unmet(policy: WatchedPolicy) -> str:
    names = [
        f"{visible(one.name, 120)} ({visible(one.collection, 80)})"
        for one in policy.entries
        if not one.met or (one.kind != "operator" and not one.kept)
    ]
    return f"Named in the policy, but matching no call: {', '.join(names[:50])}." if names else ""


def _weight(one: DecidedOperator) -> tuple[float, int]:
    return -(one.recompute_ms_per_step or 0.0), -(one.kept_bytes + one.result_bytes)


def _selective_policies_html(result: Result) -> Mapping[str, Any]:
    found = known(result.policies)
    return {
        "policies": [
            {
                "name": policy.name,
                "where": _where(policy),
                "rows": [
                    _selective_policies_row(policy, one)
                    for one in sorted(policy.operators, key=_weight)[:_SELECTIVE_POLICIES_MOST_ROWS]
                ],
                "unmet": _unmet(policy),
            }
            for policy in found.policies[:_MOST_POLICIES]
        ],
    }


def _selective_policies_text(page: Page, result: Result) -> None:
    found = known(result.policies)
    page.title(_SELECTIVE_POLICIES_TITLE)
    for policy in found.policies[:_MOST_LINES]:
        page.prose(_sentence(policy))
        if unmet := _unmet(policy):
            page.prose(unmet, indent="    ")
    for sentence in found.untold:
        page.prose(sentence)


SELECTIVE_POLICIES = Section(
    anchor="policies",
    title=_SELECTIVE_POLICIES_TITLE,
    template="selective_policies.html",
    present=lambda result: bool(result.policies and result.policies.policies),
    html=_selective_policies_html,
    lead=_selective_policies_lead,
    text=_selective_policies_text,
    link="Policies",
    help=(
        _SELECTIVE_POLICIES_TITLE,
        "shows what selective checkpoints' policies were asked in one step, what they decided, "
        "and what their recomputes then ran again.",
    ),
)


_COMPILED_CODE_TITLE = "Recomputes in compiled code"
_COMPILED_CODE_MOST_ROWS = 200
_WHY = {
    "checkpoint": "a checkpoint in the compiled code",
    "compiler": "the compiler's own choice",
    "budget": "the memory budget",
}


def _compiled_code_lead(result: Result) -> str:
    code = known(result.compiled)
    broken = f"{plural(len(code.graph_breaks), 'graph break')} left code to Python."
    if not code.graphs and not code.unknown:
        return f"No compiled code has a backward pass. {broken}"
    if not code.graphs:
        names = visible(", ".join(code.unknown[:3]), 200)
        return f"Not known: the compiler's graphs for {names} are missing."
    every = sum(graph.operators for graph in code.graphs)
    free = sum(graph.free for graph in code.graphs)
    asked = sum(graph.recomputed for graph in code.graphs) - free
    graphs = plural(len(code.graphs), "compiled graph")
    said = (
        f"Of {plural(every, 'operator')} in {graphs}, the backward graphs run {asked} again "
        f"because of a checkpoint or at a cost, and {free} for free"
    )
    said += ": these are fused with what needs them and cost no memory traffic." if free else "."
    if code.unknown:
        said += f" The graphs for {visible(', '.join(code.unknown[:3]), 200)} are missing."
    if code.graph_breaks:
        said += f" {broken}"
    return said


def _compiled_code_row(graph: str, one: CompiledRecompute) -> tuple[str, ...]:
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


def _compiled_code_html(result: Result) -> Mapping[str, Any]:
    code = known(result.compiled)
    rows = [
        _compiled_code_row(graph.name, one) for graph in code.graphs for one in graph.recomputes
    ]
    return {
        "rows": rows[:_COMPILED_CODE_MOST_ROWS],
        "breaks": [
            reason.partition("\n")[0] for reason in code.graph_breaks[:_COMPILED_CODE_MOST_ROWS]
        ],
    }


COMPILED_CODE = Section(
    anchor="compiled",
    title=_COMPILED_CODE_TITLE,
    template="compiled_code.html",
    present=lambda result: result.compiled is not None,
    html=_compiled_code_html,
    lead=_compiled_code_lead,
    link="Compiled",
    help=(
        _COMPILED_CODE_TITLE,
        "lists what the compiler's graphs run again in their backward pass: for a checkpoint, for "
        "the memory budget, or because it is cheaper than keeping it.",
    ),
)
