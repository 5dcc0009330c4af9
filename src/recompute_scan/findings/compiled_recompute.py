"""RS007: part of the backward pass is compiled, and what it recomputes cannot be counted."""

from __future__ import annotations

from recompute_scan.findings.base import Answer, NotApplicable, Rule
from recompute_scan.findings.evidence import Evidence
from recompute_scan.recompute.verdict import Compiled
from recompute_scan.result import Finding

_WHAT_TO_TRY = (
    "To count, record with `recompute-scan run`, which keeps the compiler's graphs (torch 2.10 and "
    "newer). Where there are none, set TORCH_COMPILE_DISABLE=1: the checkpoints are the same, and "
    "every operator shows."
)
# https://github.com/pytorch/pytorch/issues/190758, open; torch 2.13 does so.
_NEW_NUMBERS = (
    "The compiler's memory budget was {budget}. Below 1 it may run operators again that draw "
    "random numbers, and then draws others: gradients through dropout are wrong (pytorch/pytorch "
    "issue 190758). Set torch._functorch.config.activation_memory_budget to 1.0 where anything in "
    "the model draws random numbers."
)


def check(evidence: Evidence) -> Answer:
    """One finding where compiled nodes run in the backward pass."""
    if not evidence.has_backward:
        return NotApplicable("The trace shows no autograd nodes, so none that is compiled.")
    return [_finding(evidence, evidence.compiled)] if evidence.compiled is not None else []


def _finding(evidence: Evidence, compiled: Compiled) -> Finding:
    share = f"{100 * compiled.share:.0f} % of the backward pass is compiled"
    again = evidence.compiled_calls_again
    if compiled.recomputes:
        title = f"{share} and runs forward work again that operators do not count"
        detail = (
            "Operators that no gradient needs run inside compiled backward code: a checkpoint "
            "inside what was compiled, or the compiler's own choice. How often, and of which "
            "layers, cannot be told from outside."
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
            " Recomputes of compiled code from outside, which checkpoints around it cause, are "
            "counted; those inside come on top of them."
        )
    budget = evidence.environment.get("activation_memory_budget")
    if budget:
        detail += f" {_NEW_NUMBERS.format(budget=budget)}"
    return RULE.finding(
        evidence,
        severity="warning" if budget or (compiled.recomputes and again) else "info",
        title=title,
        detail=f"{detail} {_WHAT_TO_TRY}",
        evidence=(
            f"{compiled.nodes} compiled nodes in the backward pass",
            *((f"{again} compiled calls ran again, outside of them",) if again else ()),
            *_attention(evidence),
        ),
    )


def _attention(evidence: Evidence) -> tuple[str, ...]:
    """What attention's kernels say, where there are any."""
    if evidence.attention_kernels is None:
        return ()
    backward, again = evidence.attention_kernels
    return (f"attention kernels: {backward} backward, {again} forward ones that ran again",)


RULE = Rule("RS007", "compiled-recompute", check, needs="nothing")
