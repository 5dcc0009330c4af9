"""Whether two results say the same: verdict, counts and cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from recompute_scan.result import Result

# Fields by name; what names, sites and clocks say may differ.
_FIELDS = (
    "verdict",
    "evidence_level",
    "confidence",
    "recompute_per_backward",
    "mean_recompute",
    "recomputed_share",
    "attention",
    "families",
    "cost",
)
_STEP = ("duration_ms", "micro_batches", "forward_ops", "recomputed_ops")
_REGION = (
    "forward_runs_per_step",
    "recompute_runs_per_backward",
    "mean_recompute",
    "forward_ms_per_step",
    "recompute_ms_per_step",
    "redundant_ms_per_step",
)
_CHECKPOINT = ("depth", "variant")
_RELATIVE = 1e-9
# Rules on what `run` compared and on policies, which no archive holds.
_STAY_OUT = ("RS4", "RS5")


def differences(before: Result, after: Result) -> Iterator[str]:
    """What differs between two results, one sentence each; nothing where they agree."""
    first, second = _plain(before), _plain(after)
    for name in first:
        if _alike(first[name], second[name]):
            continue
        if isinstance(first[name], (str, float, int)) or second[name] is None:
            yield f"{name}: {first[name]} in the original, {second[name]} here."
        else:
            yield f"{name}: not the same as in the original."


def untold(before: Result, after: Result) -> Iterator[str]:
    """What the original knows beside verdict, counts and cost, and the archive does not."""
    if _who(before) - _who(after):
        yield "Checkpoint call sites were read from Python frames, which stay out."
    if before.fidelity is not None and after.fidelity is None:
        yield "What was compared of the recomputes with their forward stays out."
    if before.policies is not None and before.policies.policies and after.policies is None:
        yield "What policies of selective checkpoints decided stays out."
    if before.memory is not None and after.memory is None:
        yield "The allocations that tell of memory stay out."


def _who(result: Result) -> set[str]:
    return {c.mechanism for r in result.regions for c in r.checkpoints if c.mechanism}


def _plain(result: Result) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(result)
    plain = {name: fields[name] for name in _FIELDS}
    cost = plain["cost"]
    if cost:
        plain["cost"] = {name: cost[name] for name in cost if name not in ("method", "assumptions")}
    plain["steps"] = [
        {name: step[name] for name in _STEP} for step in fields["steps"] if step["complete"]
    ]
    plain["regions"] = [
        {name: region[name] for name in _REGION}
        | {"checkpoints": [{name: c[name] for name in _CHECKPOINT} for c in region["checkpoints"]]}
        for region in fields["regions"]
    ]
    plain["findings"] = [
        {name: finding[name] for name in ("code", "severity", "saving_ms", "saving_pct")}
        for finding in fields["findings"]
        if not finding["code"].startswith(_STAY_OUT)
    ]
    plain["checked"] = [
        (rule["code"], rule["status"])
        for rule in fields["checked"]
        if not rule["code"].startswith(_STAY_OUT)
    ]
    plain["ranks"] = [(rank["verdict"], rank["step_ms"]) for rank in fields["ranks"]]
    return plain


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
