"""RS011: the compiler runs random operators again without the state that they drew from."""

from __future__ import annotations

from recompute_scan.findings.base import Answer, Rule, from_code
from recompute_scan.findings.code import CodeEvidence, place_of


def check_code(evidence: CodeEvidence) -> Answer:
    """One finding where a backward graph draws random numbers anew."""
    redrawn = [each for each in evidence.recomputes() if each[1].redrawn]
    if not redrawn:
        return []
    budgets = [graph.memory_budget for graph, _ in redrawn if graph.memory_budget is not None]
    lowered = f" The memory budget was {min(budgets):g}." if budgets else ""
    number = sum(one.operators for _, one in redrawn)
    return [
        RULE.finding(
            evidence,
            title=f"{number} random operators draw other numbers when the compiler repeats them",
            detail=(
                "The backward graph runs them again without the random state of their first run, "
                "so that gradients belong to another mask than the forward pass used (pytorch "
                f"issue 190758).{lowered} Set torch._functorch.config.activation_memory_budget to "
                "1.0 where anything in the model draws random numbers."
            ),
            evidence=tuple(place_of(*each) for each in redrawn[:8]),
        )
    ]


RULE = Rule(
    "RS011",
    "budget-recomputes-random",
    from_code,
    check_code=check_code,
    severity="error",
    wrong_gradients=True,
)
