"""What the kernels around attention's bear out, and what they do not.

Names are one account, the sequence of all kernels is another: both have to agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from recompute_scan.arrays import median
from recompute_scan.model import Kernels
from recompute_scan.recompute.attention.kernel_evidence import (
    NAMED_BACKWARD,
    KernelEvidence,
)
from recompute_scan.recompute.attention.passes import BACKWARD, FORWARD, RECOMPUTE
from recompute_scan.recompute.attention.sequence import (
    KernelSequence,
    kernel_sequence,
    recomputed,
    spans_beside,
    spans_of,
    with_recomputes,
)
from recompute_scan.recompute.verdict import Judgement
from recompute_scan.trace.columns import Bool, Int64, Trace

# A recompute that repeats less of a layer's kernels is not known to be one of the whole layer.
_WHOLE = 0.7
# The backward pass reads what a recompute makes: of other kernels, this share is let be.
_STRANGE = 0.25
PRODUCT = re.compile(r"gemm|nvjet|cijk|cutlass|xmma|ampere_|volta_|turing_|sm\d\d_", re.I)
# Two, and what a second loss has of its own.
_MOST_PRODUCTS = 2.1
# ReLU's has no such word.
_OF_BACKWARD = re.compile(rf"{NAMED_BACKWARD.pattern}|threshold_kernel", re.I)
_ATTENTION = re.compile(r"flash|attn|attention|fmha|sdpa", re.I)


def settle(trace: Trace, kernels: Kernels, found: KernelEvidence) -> KernelEvidence:
    """The evidence, without what the kernels around those that ran again do not bear out.

    A checkpoint around attention alone, or one that keeps the results of matrix products, runs
    attention again as one around the whole layer does. And a recompute is a piece of the forward
    pass that the backward pass goes on from. Where each such piece is followed by a kernel that is
    neither a product nor named after the backward pass, and that the rest of it does not have,
    something else used what was computed: a hook ran it. And more products than gradients take are
    recomputes of something without attention.
    """
    if found.judgement.verdict == "inconclusive":
        return found
    sequence = kernel_sequence(trace, kernels, found.rows)
    at = sequence.places(found.rows)
    events = with_recomputes(found.events, found.passes)
    if events is None:
        return found
    highest = int(found.judgement.highest or 0)
    repeats = recomputed(sequence, at, events, highest)
    if highest < 2 and more_products(trace, sequence, at, events, repeats >= 0):
        return _unsettled(
            found,
            "More products run in the backward pass than gradients take: some may be recomputed.",
        )
    if not highest:
        return found
    if _backward_twice(events):
        return _unsettled(
            found,
            "More runs backward than forward: how many backward passes a recompute is for cannot be"
            " told.",
        )
    again = repeats >= 0
    forwards = [int(row) for row, event in zip(at, events, strict=True) if event == FORWARD]
    number = sum(event == RECOMPUTE for event in events)
    if _used_elsewhere(trace, sequence, again, at, events):
        return _unsettled(
            found,
            "Forward work runs again in the backward pass, and kernels of neither follow it: a "
            "hook cannot be told from a recompute.",
        )
    between = np.diff(forwards)
    if found.judgement.verdict != "full" or not number or not len(between):
        return found
    if again.sum() >= _WHOLE * median(between) * number:
        return found
    return _unsettled(
        found,
        "Attention runs again, and most of the kernels around do not: a checkpoint that keeps "
        "results cannot be told from one whose kernels ran in another order.",
    )


def _backward_twice(events: list[str]) -> bool:
    """May two backward passes go through what ran again once?

    Where losses are two, each backward pass has recomputes of its own, equally many, so that no
    kernel of the one follows on one of the other.
    """
    number = Counter(events)
    uneven = number[RECOMPUTE] % max(1, number[BACKWARD]) > 0
    in_a_row = (BACKWARD, BACKWARD) in pairwise(events)
    return number[BACKWARD] > number[FORWARD] and (uneven or in_a_row) and number[RECOMPUTE] > 0


def _unsettled(found: KernelEvidence, reason: str) -> KernelEvidence:
    return replace(found, judgement=Judgement("inconclusive", reason))


def _used_elsewhere(
    trace: Trace,
    sequence: KernelSequence,
    again: Bool,
    at: Int64,
    events: list[str],
) -> bool:
    """Do kernels follow the recomputes, or many, that have no other place in the backward pass?"""
    ends = np.flatnonzero(again[:-1] & ~again[1:]) + 1
    size = len(trace.names)
    behind = np.bincount(sequence.token[ends], minlength=size)
    rest = np.bincount(
        sequence.token[spans_of(at, events, False, len(again)) & ~again], minlength=size
    )
    # What stands right before a counted kernel of the backward pass prepares it.
    counted = at[np.array([event == BACKWARD for event in events], np.bool_)]
    ends = ends[~(np.isin(ends, counted) | np.isin(ends + 1, counted))]
    strange = [
        2 * behind[code] > rest[code]
        and not (PRODUCT.search(trace.names[code]) or _OF_BACKWARD.search(trace.names[code]))
        for code in sequence.token[ends].tolist()
    ]
    return bool(sum(strange) > _STRANGE * len(strange))


def more_products(
    trace: Trace, sequence: KernelSequence, at: Int64, events: Sequence[str], again: Bool
) -> bool:
    """Are there more products in the backward pass, beside what ran again, than gradients take?

    Between its first counted kernel and its last the backward pass passes what is between those of
    the forward: two products for each. Compiled code has products in kernels of its own: there
    nothing is said.
    """
    if any(name.startswith("triton_") for name in trace.names):
        return False
    untold = [
        bool(PRODUCT.search(name) and not (_ATTENTION.search(name) or NAMED_BACKWARD.search(name)))
        for name in trace.names
    ]
    products = np.array(untold, np.bool_)[sequence.token] & ~again
    forward, backward = (
        int(products[one].sum()) for one in spans_beside(at, events, len(products))
    )
    # A second loss goes through the same layers again: counted is from one event to the next.
    counted = [event for event in events if event != RECOMPUTE]
    steps = Counter(pair for pair in pairwise(counted) if len(set(pair)) == 1)
    way, back = steps[FORWARD, FORWARD], steps[BACKWARD, BACKWARD]
    return backward * way > _MOST_PRODUCTS * forward * back > 0
