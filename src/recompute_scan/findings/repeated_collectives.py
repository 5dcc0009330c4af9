"""RS005: recomputes gather parameters, or communicate otherwise, once more."""

from __future__ import annotations

from collections import Counter

import numpy as np

from recompute_scan.advise import keep_and_drop, switch_of
from recompute_scan.annotations import parse_recompute
from recompute_scan.cost.communication import add_up
from recompute_scan.findings.base import Evidence, NotApplicable, Rule, no_verdict
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.collectives import (
    Collectives,
    kernels_of,
    time_of,
)
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.result import Finding, Fix
from recompute_scan.trace.columns import Int64
from recompute_scan.units import ms, size

_GOES = " They go with the checkpoint that the fix for RS001 takes out."
_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


def check(evidence: Evidence) -> list[Finding] | NotApplicable:
    """One finding for gathers of parameters inside recomputes, and one for other communication."""
    if unknown := no_verdict(evidence):
        return unknown
    facts = evidence.facts
    collectives = facts.collectives
    if not len(collectives.rows):
        return NotApplicable("The trace holds no collective communication.")
    repeated = collectives.repeated
    gathers = repeated[_is_parameter_gather(facts, repeated)]
    others = np.setdiff1d(repeated, gathers)
    found = []
    if len(gathers):
        found.append(_gathers(evidence, collectives, gathers))
    if len(others):
        found.append(_others(evidence, others))
    return found


def _gathers(evidence: Evidence, collectives: Collectives, gathers: Int64) -> Finding:
    facts = evidence.facts
    every = collectives.rows[_is_parameter_gather(facts, collectives.rows)]
    goes = _goes_with_the_fix(evidence, gathers)
    per_step, total = len(gathers) / facts.complete_count, len(every) / facts.complete_count
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="warning",
        confidence=evidence.confidence,
        title=f"Recomputes gather parameters again: {per_step:g} of {total:g} all-gathers per step",
        detail=(
            "The checkpoint stands outside the FSDP unit, so that its recompute gathers the unit's "
            "parameters once more than the forward and the backward pass need. "
            f"{_time(facts, gathers)}{_GOES if goes else ''}"
        ),
        evidence=_evidence(facts, gathers),
        fix=None
        if goes
        else Fix(
            summary=(
                "Checkpoint inside the FSDP units, non-reentrant: FSDP's own wrapper on the "
                "layers, or the setting of your framework for it."
            ),
            disposition="review",
            diff=None,
            keep="one checkpoint inside each FSDP unit",
            remove="the checkpoint outside",
            docs=_DOCS,
            reason="Which units are checkpointed decides what memory is needed.",
        ),
        saving_ms=None,
        saving_pct=None,
    )


def _goes_with_the_fix(evidence: Evidence, gathers: Int64) -> bool:
    """Do the checkpoints go, by the fix for doubled ones, in whose recomputes these gathers are?

    Where no annotation tells whose recomputes they are, the fix for doubled checkpoints comes
    first.
    """
    facts = evidence.facts
    if facts.judgement.verdict != "doubled":
        return False
    if facts.annotations is None:
        return True
    calls = facts.calls
    annotations = {call.annotation.call: call.annotation for call in facts.annotations.calls}
    removed = {
        switch_of(keep_and_drop(region.checkpoints, evidence.alone, sharded=True)[1])
        for region in evidence.regions
        if len(region.checkpoints) > 1
    }
    for row in gathers:
        above = int(calls.parent[row])
        while above >= 0 and parse_recompute(calls.names[calls.name[above]]) is None:
            above = int(calls.parent[above])
        annotation = (
            annotations.get(parse_recompute(calls.names[calls.name[above]]) or 0)
            if above >= 0
            else None
        )
        if annotation is None or (annotation.mechanism, annotation.site or None) not in removed:
            return False
    return True


def _others(evidence: Evidence, others: Int64) -> Finding:
    facts = evidence.facts
    per_step = len(others) / facts.complete_count
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="info",
        confidence=evidence.confidence,
        title=f"Recomputes repeat communication: {per_step:g} collectives per step",
        detail=(
            "The recomputed blocks communicate in their forward, as tensor-parallel and expert "
            f"layers do, and so does every recompute. {_time(facts, others)} Selective "
            "checkpointing that saves what is received avoids it, for memory."
        ),
        evidence=_evidence(facts, others),
        fix=None,
        saving_ms=None,
        saving_pct=None,
    )


def _is_parameter_gather(
    facts: RecomputeFacts, rows: Int64
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each collective: is it a gather that FSDP started?"""
    calls = facts.calls
    gather, sharding = calls.matching(words.GATHER), calls.matching(words.SHARDING)
    found = np.zeros(len(rows), np.bool_)
    for place in np.flatnonzero(gather[calls.name[rows]]):
        above = int(calls.parent[rows[place]])
        while above >= 0 and not sharding[calls.name[above]]:
            above = int(calls.parent[above])
        found[place] = above >= 0
    return found


def _evidence(facts: RecomputeFacts, rows: Int64) -> tuple[str, ...]:
    calls = facts.calls
    names = Counter(calls.names[calls.name[row]] for row in rows)
    said = [
        f"{name}: {number / facts.complete_count:g} per step inside recomputes"
        for name, number in names.most_common()
    ]
    found = add_up(facts, rows)
    if found.bytes is not None:
        said.append(f"{size(found.bytes)} per step, of each the larger of its input and its output")
    if found.exposed_ms is not None:
        said.append(f"{ms(found.exposed_ms)} per step with no computation beside them")
    return tuple(said)


def _time(facts: RecomputeFacts, rows: Int64) -> str:
    ms_a_step = time_of(facts.calls, facts.kernels, rows) / 1e6 / facts.complete_count
    taken = f"{ms_a_step:.3g} ms of a recorded step"
    if kernels_of(facts.calls, facts.kernels, rows).any():
        return f"They take {taken}."
    return (
        f"To start them takes the host {taken}; how long the step then waits for them is not in "
        "the trace."
    )


RULE = Rule("RS005", "repeated-collectives", check)
