"""What the policies of selective checkpoints decided, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.deciding import DecidedOperator, Policies, WatchedPolicy
from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.result import Result
from recompute_scan.units import UNKNOWN, ms, plural, size

_TITLE = "What do the policies keep?"
_MOST_POLICIES, _MOST_ROWS, _MOST_LINES = 20, 100, 4


def _sentence(policy: WatchedPolicy) -> str:
    name = visible(policy.name, 120)
    return (
        f"{name} was asked {plural(policy.met, 'time')} in {plural(policy.regions, 'region')}: it "
        f"kept {plural(policy.kept, 'result')}, {size(policy.kept_bytes)}."
    )


def _lead(found: Policies) -> str:
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


def _row(policy: WatchedPolicy, one: DecidedOperator) -> tuple[str, ...]:
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
    return f"Named, and equal to no call: {', '.join(names[:50])}." if names else ""


def _weight(one: DecidedOperator) -> tuple[float, int]:
    return -(one.recompute_ms_per_step or 0.0), -(one.kept_bytes + one.result_bytes)


def _html(result: Result) -> Mapping[str, Any]:
    found = result.policies
    policies = found.policies[:_MOST_POLICIES] if found else ()
    return {
        "lead": _lead(found) if found else "",
        "policies": [
            {
                "name": policy.name,
                "where": _where(policy),
                "rows": [
                    _row(policy, one) for one in sorted(policy.operators, key=_weight)[:_MOST_ROWS]
                ],
                "unmet": _unmet(policy),
            }
            for policy in policies
        ],
    }


def _text(page: Page, result: Result) -> None:
    found = result.policies
    if found is None:
        return
    page.title(_TITLE)
    for policy in found.policies[:_MOST_LINES]:
        page.prose(_sentence(policy))
        if unmet := _unmet(policy):
            page.prose(unmet, indent="    ")
    for sentence in found.untold:
        page.prose(sentence)


def _markdown(result: Result) -> str:
    if result.policies is None:
        return ""
    return f"#### {_TITLE}\n\n{markdown_prose(_lead(result.policies))}"


SECTION = Section(
    anchor="policies",
    title=_TITLE,
    template="selective_policies.html",
    present=lambda result: bool(result.policies and result.policies.policies),
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Policies",
    help=(
        _TITLE,
        "shows what selective checkpoints' policies were asked in one step, what they decided, "
        "and what their recomputes then ran again.",
    ),
)
