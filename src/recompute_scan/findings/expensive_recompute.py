"""RS012: the compiler runs products or attention again, and no checkpoint asks for it."""

from __future__ import annotations

from recompute_scan.findings.base import Answer, Rule, from_code
from recompute_scan.findings.code import CodeEvidence, place_of


def check_code(evidence: CodeEvidence) -> Answer:
    """One finding where costly operators run again by the compiler's own choice."""
    costly = [
        (graph, one)
        for graph, one in evidence.recomputes()
        if one.why != "checkpoint" and not one.free
    ]
    if not costly:
        return []
    number = sum(one.operators * one.times for _, one in costly)
    budgets = [graph.memory_budget for graph, _ in costly if graph.memory_budget is not None]
    because = (
        f"The memory budget of {min(budgets):g} asks for it: below 1 the compiler keeps fewer "
        "results and works out the rest again. Where the device has memory left, set "
        "torch._functorch.config.activation_memory_budget closer to 1.0."
        if budgets and min(budgets) < 1
        else "No checkpoint and no known memory budget asks for it."
    )
    return [
        RULE.finding(
            evidence,
            title=f"The compiler runs {number} products or attentions again by its own choice",
            detail=f"They take as long as in the forward pass, unlike what is fused. {because}",
            evidence=tuple(place_of(*each) for each in costly[:8]),
        )
    ]


RULE = Rule("RS012", "expensive-node-recomputed", from_code, check_code=check_code)
