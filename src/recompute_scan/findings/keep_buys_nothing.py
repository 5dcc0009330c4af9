"""RS504: a policy keeps results that no recompute asks for."""

from __future__ import annotations

from recompute_scan.deciding import DecidedOperator, WatchedPolicy
from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.policy_facts import POLICY_DOCS, describe_decided
from recompute_scan.result import Finding, Fix
from recompute_scan.units import size

# Of what the policy keeps, so much at least.
_MUCH = 0.01


def check(evidence: Evidence) -> Answer:
    """One finding for each policy that keeps something for nothing."""
    found = []
    for policy in evidence.decided:
        useless = [one for one in policy.operators if _useless(policy, one)]
        if useless:
            found.append(_finding(evidence, policy, useless))
    return found


def _useless(policy: WatchedPolicy, one: DecidedOperator) -> bool:
    """Were its results kept in memory, and was none of them asked for by any recompute?

    Told only where every region was recomputed: one whose backward is still to come may ask.
    """
    enough = one.kept_bytes > _MUCH * policy.kept_bytes
    return enough and not one.served and policy.recomputes >= policy.regions > 0


def _finding(evidence: Evidence, policy: WatchedPolicy, useless: list[DecidedOperator]) -> Finding:
    together = sum(one.kept_bytes for one in useless)
    names = ", ".join(one.name for one in useless)
    return RULE.finding(
        evidence,
        confidence="high",
        title=f"The policy {policy.name} keeps {size(together)} that no recompute asks for",
        detail=(
            f"{names}: the results are kept in the forward, and all recomputes end before they "
            "would need them. Recomputing these operators would cost no time either."
        ),
        evidence=(
            *describe_decided(policy),
            *(
                f"{one.name}: kept {one.kept} times, {size(one.kept_bytes)}; asked for 0 times"
                for one in useless
            ),
        ),
        fix=Fix(
            summary=f"Let the policy recompute {names}: it frees {size(together)}.",
            disposition="review",
            diff=None,
            keep="the other operators",
            remove=names,
            docs=POLICY_DOCS,
            reason="The same operator may be needed elsewhere, under another checkpoint.",
        ),
    )


RULE = Rule("RS504", "keep-buys-nothing", check, needs="policies")
