"""What the rules on policies share: their names, their entries, and the edit that mends one."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct

from recompute_scan.advise import place
from recompute_scan.advise.edit import change_diff
from recompute_scan.deciding import DecidedOperator, PolicyEntry, WatchedPolicy
from recompute_scan.findings.base import NotApplicable
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.memory_headroom import WORTH
from recompute_scan.result import Fix
from recompute_scan.units import plural

POLICY_DOCS = (
    "https://docs.pytorch.org/docs/stable/checkpoint.html"
    "#torch.utils.checkpoint.create_selective_checkpoint_contexts"
)


class DearOperator(Struct, frozen=True):
    """An operator whose recompute under a policy takes time.

    Attributes:
        policy: The policy.
        operator: What was decided about it.
        ms: What its recomputes take per step.
        pct: That as a part of the step.
    """

    policy: WatchedPolicy
    operator: DecidedOperator
    ms: float
    pct: float


def describe_decided(policy: WatchedPolicy) -> tuple[str, ...]:
    """The policy and its checkpoint, as lines of evidence."""
    defined = place(policy.defined or None)
    asked = plural(policy.regions, "region")
    return (
        f"policy: {policy.name}{defined}",
        f"checkpoint: {policy.mechanism or 'unknown'}{place(policy.site or None)}, {asked}",
    )


def overloads_met(policy: WatchedPolicy, entry: PolicyEntry) -> list[DecidedOperator]:
    """The operators that were called under an entry's name, whatever their overload."""
    if entry.kind == "packet":
        return [one for one in policy.operators if one.name.startswith(f"{entry.name}.")]
    return [one for one in policy.operators if one.name == entry.name]


def dear_ones(
    evidence: Evidence, wanted: Callable[[WatchedPolicy, DecidedOperator], bool]
) -> list[DearOperator] | NotApplicable:
    """The wanted ones of all operators whose recompute takes enough of a step for a finding."""
    cost = evidence.cost
    if cost is None:
        return NotApplicable("There is no step time to compare with.")
    every = [
        DearOperator(policy, one, time, 100 * time / cost.step_ms)
        for policy in evidence.decided
        for one in policy.operators
        if (time := one.recompute_ms_per_step or 0.0) >= WORTH * cost.step_ms
    ]
    return [dear for dear in every if wanted(dear.policy, dear.operator)]


def keep_too(summary: str, reason: str) -> Fix:
    """The fix that lets a policy keep one more operator."""
    return Fix(
        summary=summary,
        disposition="review",
        diff=None,
        keep="what the policy keeps already",
        remove="",
        docs=POLICY_DOCS,
        reason=reason,
    )


def spell_overloads(
    evidence: Evidence, policy: WatchedPolicy, entries: list[PolicyEntry]
) -> str | None:
    """A diff that gives the entries of one statement the overload that is called.

    ``None`` where the source is not the user's, where several overloads of one are called, or where
    it is spelled otherwise.
    """
    site = next((one.site for one in entries if one.site), "")
    source = evidence.sources.get(site)
    if source is None or source.installed:
        return None
    text = source.text.split("\n")
    lines = text[source.begin - source.first : source.end - source.first + 1]
    new = "\n".join(lines)
    for entry in entries:
        met = overloads_met(policy, entry)
        if len(met) != 1:
            return None
        spelled = re.compile(rf"(\bops\.{re.escape(entry.name)})(?![\w.])")
        new = spelled.sub(rf"\1.{met[0].name.rpartition('.')[2]}", new)
    changed = new.split("\n")
    return change_diff(site, source, changed) if changed != lines else None


def may_keep(policy: WatchedPolicy, collection: str) -> bool:
    """Is this a collection of what the policy keeps? Each operator of it that was met was kept
    at least once, and one was.
    """
    met = [
        one
        for one in policy.entries
        if one.collection == collection and one.kind == "operator" and one.met
    ]
    return bool(met) and all(one.kept for one in met)
