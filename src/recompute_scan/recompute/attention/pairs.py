"""Kernels whose names differ by their direction alone: what tells recomputes without attention.

Libraries call the kernel of a gradient as that of its forward, with another word in it, such as
``softmax_warp_forward`` and ``softmax_warp_backward``. Where every call has one of each, the two
are read as attention's main kernels are. They are found in the trace, not in a list.

Each pair is an account of its own; those that run again have to do so equally often.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from msgspec.structs import replace

from recompute_scan.arrays import tally
from recompute_scan.model import Calls, Kernels
from recompute_scan.recompute.attention.kernel_evidence import (
    NAMED_BACKWARD,
    Directions,
    KernelEvidence,
    Roles,
    read_roles,
)
from recompute_scan.recompute.attention.kernels import Direction
from recompute_scan.recompute.attention.unlike import leaves_layers
from recompute_scan.recompute.attention.upheld import repeats_forward
from recompute_scan.recompute.verdict import Judgement
from recompute_scan.trace.columns import Kind, Trace

_IDENTIFIER = re.compile(r"[A-Za-z_]\w{2,}")
_BACK = re.compile(
    r"_?(?<![a-zA-Z])(?:backward|bwd|bw|grad)(?=[_A-Z\d]|$)|(?<=[a-z\d])(?:Backward|Bwd|Grad)"
)
_FORTH = re.compile(r"_?(?<![a-zA-Z])(?:forward|fwd|fw)(?=[_A-Z\d]|$)|(?<=[a-z\d])(?:Forward|Fwd)")
# A stem that is shorter, or says no more than this, is anybody's.
_SHORTEST = 2
_ANYBODYS = frozenset({"kernel", "void", "triton", "at", "fused"})
# torch's names for both directions of a ReLU, which share no word.
_RELU = (re.compile(r"launch_clamp_scalar|clamp_min_scalar"), re.compile(r"threshold_kernel_impl"))
# What recording missed, as a share.
_UNEVEN = 0.05
# One call can have several kernels of either direction: so many choices are tried.
_MOST_CHOICES = 9
# So many kinds of pairs are read, those that run most often; models have a dozen.
_MOST_PAIRS = 32


def read_pairs(trace: Trace, calls: Calls, kernels: Kernels) -> KernelEvidence | None:
    """What pairs of kernels say, attention apart; ``None`` where no pair can be read."""
    readings = _readings(trace, calls, kernels)
    if not readings:
        return None
    numbers = {one.judgement.highest for one in readings if one.judgement.highest}
    best = max(readings, key=lambda one: (one.judgement.highest or 0, len(one.rows)))
    if len(numbers) > 1:
        return _untold(best, "Kernels of several kinds run again, but not equally often.")
    if not numbers and repeats_forward(trace, kernels, best):
        return _untold(
            best,
            "Kernels run in the backward pass as they did in the forward pass, and none is known.",
        )
    left = leaves_layers(trace, kernels, best, readings) if best.judgement.highest == 1 else None
    if left is None:
        return best
    if left == "inconclusive":
        return _untold(best, "Some kernels return in a row and do not run again: layers, or heads.")
    return replace(best, judgement=replace(best.judgement, verdict=left))


def highest_of_pairs(trace: Trace, calls: Calls, kernels: Kernels) -> float:
    """How often the pair that runs most often again does so, attention apart; 0 for not at all."""
    readings = _readings(trace, calls, kernels)
    return max((one.judgement.highest or 0.0 for one in readings), default=0.0)


def _readings(trace: Trace, calls: Calls, kernels: Kernels) -> list[KernelEvidence]:
    readings = []
    for choices in _pairs(trace, kernels):
        read = (read_roles(trace, calls, kernels, roles, of_attention=False) for roles in choices)
        found = next((one for one in read if one is not None and _one_each(one)), None)
        if found is not None:
            readings.append(found)
    return readings


def paired_names(trace: Trace, kernels: Kernels) -> Directions:
    """The direction of each kernel of a pair."""
    return {
        code: direction
        for choices in _pairs(trace, kernels)
        for roles in choices
        for code, (_, direction) in roles.items()
    }


def _untold(found: KernelEvidence, reason: str) -> KernelEvidence:
    return replace(found, judgement=Judgement("inconclusive", reason))


def _one_each(found: KernelEvidence) -> bool:
    """Did every call have one kernel of each direction, and was their order read?"""
    forward, backward = (
        sum(getattr(family, way) for family in found.families) for way in ("forward", "backward")
    )
    even = abs(forward - backward) <= _UNEVEN * backward
    # An order that is seen once, and nothing else, may be that of steps.
    told = found.by_thread or len(found.passes) > 1 or not found.judgement.highest
    return found.judgement.verdict != "inconclusive" and even and told


def _pairs(trace: Trace, kernels: Kernels) -> Iterator[list[Roles]]:
    """For each stem of names the choices of what are its forward and its backward kernels."""
    event = kernels.event[trace.kind[kernels.event] == Kind.KERNEL]
    codes, counts = tally(trace.name[event])
    number = dict(zip(codes.tolist(), counts.tolist(), strict=True))
    backward: dict[str, dict[str, list[int]]] = {}
    forward: list[tuple[str, int]] = []
    for code in codes.tolist():
        name = trace.names[code]
        if _RELU[1].search(name):
            backward.setdefault("relu", {}).setdefault("", []).append(code)
            continue
        stemmed = [_stem(word, _BACK) for word in _IDENTIFIER.findall(name)]
        if stems := [stem for stem in stemmed if stem]:
            whole = name.partition("<")[0] if len(stems) == 1 else name
            backward.setdefault(stems[0], {}).setdefault(whole, []).append(code)
        elif not NAMED_BACKWARD.search(name):
            forward.append((name, code))
    ran = {
        stem: sum(number[code] for codes in groups.values() for code in codes)
        for stem, groups in backward.items()
    }
    commonest = sorted(backward, key=lambda stem: (-ran[stem], stem))[:_MOST_PAIRS]
    for stem in sorted(commonest):
        after = backward[stem]
        mate = _RELU[0] if stem == "relu" else _mate_of(stem)
        mates = [
            (name, code)
            for name, code in forward
            if any(mate.search(word) for word in _IDENTIFIER.findall(name))
        ]
        # Where some say that they are of the forward pass, the others are of neither.
        saying = [(name, code) for name, code in mates if _FORTH.search(name)]
        before: dict[str, list[int]] = {}
        for name, code in saying or mates:
            before.setdefault(name.partition("<")[0], []).append(code)
        if before:
            sides = (
                _of_one_call(list(side.values()), number)[:_MOST_CHOICES]
                for side in (before, after)
            )
            choices = [
                _roles(stem, one, two)
                for one, two in product(*sides)
                if sum(number[code] for code in one) >= sum(number[code] for code in two)
            ]
            yield choices[:_MOST_CHOICES]


def _roles(stem: str, before: list[int], after: list[int]) -> Roles:
    forward: tuple[str, Direction] = (stem, "forward")
    backward: tuple[str, Direction] = (stem, "backward")
    return dict.fromkeys(before, forward) | dict.fromkeys(after, backward)


def _mate_of(stem: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-zA-Z]){re.escape(stem)}(?=[_A-Z\d]|$)|_{re.escape(stem)}_")


def _stem(word: str, direction: re.Pattern[str]) -> str:
    """What is before the direction in an identifier; empty where there is none, or nothing."""
    found = direction.search(word)
    stem = word[: found.start()].strip("_") if found else ""
    return stem if len(stem) >= _SHORTEST and stem not in _ANYBODYS else ""


def _of_one_call(groups: list[list[int]], number: dict[int, int]) -> list[list[int]]:
    """Each group alone, where all run equally often: in one call. Else all, which are variants."""
    equal = len({sum(number[code] for code in codes) for codes in groups}) == 1
    return groups if equal else [[code for codes in groups for code in codes]]
