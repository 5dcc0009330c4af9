"""RS010: the compiler could not trace a checkpointed function to its end, and left it to Python."""

from __future__ import annotations

import re

from recompute_scan.findings.base import Answer, Rule, from_code
from recompute_scan.findings.code import CodeEvidence
from recompute_scan.result import Finding

# What torch adds to the reason of a break inside an operator that takes functions
# (torch/_dynamo/exc.py; seen on torch 2.13).
_INSIDE = re.compile(r"Higher Order Operator: torch\.utils\.checkpoint\b")
_PLACE = re.compile(r"Graph break in user code at (.{1,1000}:\d+)")
_REASON = re.compile(r"Graph Break Reason: .{0,500}:[^\S\n]*\n\s*(\S.{0,200})")


def check_code(evidence: CodeEvidence) -> Answer:
    """One finding for each place where the compiler left a checkpointed function."""
    found: dict[str, str] = {}
    for text in evidence.code.graph_breaks:
        place, reason = _PLACE.search(text), _REASON.search(text)
        if _INSIDE.search(text) and place is not None:
            found.setdefault(place[1], reason[1] if reason else "its reason is not told")
    return [_finding(evidence, place, reason) for place, reason in found.items()]


def _finding(evidence: CodeEvidence, place: str, reason: str) -> Finding:
    return RULE.finding(
        evidence,
        title=f"The compiler leaves a checkpointed function at {place}",
        detail=(
            "A graph break inside a checkpointed function takes the whole function out of the "
            "graph: it runs in Python, uncompiled, in the forward pass and in each recompute. "
            "Remove what breaks the graph, or move it out of the checkpointed function."
        ),
        evidence=(f"{place}: {reason}",),
    )


RULE = Rule("RS010", "graph-break-in-checkpoint", from_code, check_code=check_code)
