"""Arithmetic of a step: what the model needs, what ran, and how far that is from the peak.

MFU counts the forward pass and the backward pass, HFU all that ran, recomputes included
(Chowdhery et al. 2022, arXiv 2204.02311, appendix B; Korthikanti et al. 2022, arXiv 2205.05198).
Their ratio needs neither times nor a peak: 1 without checkpointing, about 4/3 where every layer is
recomputed once, 5/3 where it is recomputed twice.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from recompute_scan.cost.formulas import count_call, has_formula, number_type, parse_inputs
from recompute_scan.cost.peaks import Peak, peak_of
from recompute_scan.model import step_of
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.roles import Role
from recompute_scan.result import Flops
from recompute_scan.trace.columns import Bool, Int64, Kind

Float64 = npt.NDArray[np.float64]

# Where more than this share of the matrix products, convolutions and attention cannot be counted,
# what is left says nothing.
MOST_UNCOUNTED = 0.5
_MOST_NAMED = 8


class _Counted(Struct, frozen=True):
    """The calls that count, their operations, and the type that each computes in."""

    rows: Int64
    flops: Float64
    types: tuple[str, ...]
    uncounted: Counter[str] = field(default_factory=Counter)


def count_flops(
    facts: RecomputeFacts,
    step_ms: float | None,
    device: str | None,
    peak_tflops: float | None = None,
) -> Flops | None:
    """The arithmetic of one step, averaged over the complete ones; ``None`` without any.

    Args:
        facts: What ran again.
        step_ms: Duration of a step.
        device: Name of the GPU that the trace was recorded on.
        peak_tflops: Peak to compare with in TFLOP/s, for every type of number, instead of the
            one known of the device.
    """
    if not facts.complete_count:
        return None
    if len(facts.trace.signatures) < 2:
        return Flops(reason="The trace has no input shapes: record it with record_shapes=True.")
    counted = _count(facts)
    heavy = len(counted.rows) + counted.uncounted.total()
    if not heavy:
        return Flops(
            reason="No matrix product, convolution or attention ran in the recorded steps."
        )
    uncounted = tuple(name for name, _ in counted.uncounted.most_common(_MOST_NAMED))
    if counted.uncounted.total() > MOST_UNCOUNTED * heavy or not counted.flops.sum():
        named = ", ".join(uncounted)
        return Flops(
            uncounted=uncounted,
            reason=f"The trace does not say enough of most costly operators: {named}.",
        )
    forward, backward, first, redundant = (
        float(counted.flops[part].sum()) / facts.complete_count
        for part in _parts(facts, counted.rows)
    )
    model, whole = forward + backward, forward + backward + first + redundant
    ideal_ms = _ideal_ms(facts, counted, device, peak_tflops)
    # Without a verdict, part of what counts as backward work may be recomputes.
    split = facts.judgement.verdict != "inconclusive"
    # Time at the peak over time taken, for numbers of all types together.
    hfu = ideal_ms / step_ms if ideal_ms and step_ms else None
    peak = whole / ideal_ms / 1e9 if hfu and ideal_ms else None
    return Flops(
        forward_per_step=forward,
        backward_per_step=backward,
        recompute_per_step=first + redundant,
        redundant_per_step=redundant,
        hfu_over_mfu=whole / model if model and split else None,
        mfu=hfu * model / whole if hfu and split else None,
        hfu=hfu,
        peak_tflops=peak,
        peak_source=_peak_words(device, peak_tflops) if peak else None,
        uncounted=uncounted,
        reason=None if split else facts.judgement.reason,
    )


def _count(facts: RecomputeFacts) -> _Counted:
    """Calls of the complete steps whose arithmetic counts, each piece of work once.

    Operators call each other (``linear`` calls ``addmm``): the innermost one that has a formula
    counts. Those of a recompute that were entered but did not run do not.
    """
    calls, trace = facts.calls, facts.trace
    costly = np.array([has_formula(name) or _is_heavy(name) for name in calls.names], np.bool_)
    rows = np.flatnonzero(costly[calls.name] & (calls.kind == Kind.OP) & ~_idle(facts))
    rows = rows[facts.structure.role[rows] != Role.BACKWARD]
    step = step_of(list(facts.steps), calls.start[rows])
    rows = rows[(step >= 0) & facts.complete[np.maximum(step, 0)]]
    shapes = int(calls.dims.max(initial=0)) + 1
    pairs, which = np.unique(
        calls.name[rows].astype(np.int64) * shapes + calls.dims[rows], return_inverse=True
    )
    flops, types = [], []
    for name, dims in (divmod(pair, shapes) for pair in pairs.tolist()):
        inputs = parse_inputs(trace.signatures[dims])
        known = count_call(calls.names[name], inputs) if inputs else None
        flops.append(np.nan if known is None else known)
        types.append(number_type(inputs) if inputs else "")
    value = np.array(flops, np.float64)[which]
    can = np.isfinite(value)
    inner = _innermost(facts, rows, can)
    alone = ~can & ~_touches(facts, rows, rows[inner])
    alone[alone] = _innermost(facts, rows[alone], np.ones(int(alone.sum()), np.bool_))
    return _Counted(
        rows=rows[inner],
        flops=value[inner],
        types=tuple(types[place] for place in which[inner]),
        uncounted=Counter(calls.names[code] for code in calls.name[rows[alone]]),
    )


def _is_heavy(name: str) -> bool:
    """Does an operator of this name do work that should be counted?"""
    if "triton_" in name:
        # Inductor names its kernels after all that went into them; templates are products.
        return "triton_tem_" in name
    if name.startswith("aten::"):
        return words.family_of(name)[1] == "attention" and "math" not in name
    return words.family_of(name)[1] == "attention" and "Backward" not in name


def _idle(facts: RecomputeFacts) -> Bool:
    """One entry per call: is it in a recomputed operator that was entered only?"""
    idle = np.zeros(len(facts.calls), np.bool_)
    idle[facts.alignment.again[~facts.alignment.ran]] = True
    top = facts.structure.top
    return np.asarray((top >= 0) & idle[np.maximum(top, 0)], np.bool_)


def _innermost(facts: RecomputeFacts, rows: Int64, can: Bool) -> Bool:
    """Which of these (ascending) rows can be counted and hold no other that can."""
    counted = rows[can]
    inside = counted.searchsorted(rows + facts.calls.size[rows], side="right")
    return np.asarray(can & (inside == counted.searchsorted(rows, side="right")), np.bool_)


def _touches(facts: RecomputeFacts, rows: Int64, counted: Int64) -> Bool:
    """Which rows hold one of ``counted`` or are in one (both ascending)."""
    size = facts.calls.size
    after = counted.searchsorted(rows, side="right")
    holds = counted.searchsorted(rows + size[rows], side="right") > after
    before = counted[np.maximum(after - 1, 0)] if len(counted) else rows
    stands = (after > 0) & (rows <= before + size[before])
    return np.asarray(holds | stands, np.bool_)


def _parts(facts: RecomputeFacts, rows: Int64) -> tuple[Bool, Bool, Bool, Bool]:
    """Which calls are forward work, backward work, a first recompute, and a further one."""
    structure = facts.structure
    again = np.zeros(len(facts.calls), np.int8)
    again[facts.alignment.again] = 1
    again[facts.counts.redundant_rows] = 2
    top = structure.top[rows]
    recomputed = np.where(top >= 0, again[np.maximum(top, 0)], 0)
    optimizer = (top >= 0) & (structure.role[np.maximum(top, 0)] == Role.OPTIMIZER)
    model = (recomputed == 0) & ~optimizer
    backward = structure.engine[rows] >= 0
    return model & ~backward, model & backward, recomputed == 1, recomputed == 2


def _ideal_ms(
    facts: RecomputeFacts, counted: _Counted, device: str | None, peak_tflops: float | None
) -> float | None:
    """Time that a step's arithmetic takes at the peak; ``None`` where the peak is not known."""
    peak = None if peak_tflops else peak_of(device)
    if not peak_tflops and (peak is None or not facts.work.on_gpu):
        return None
    parts = np.logical_or.reduce(_parts(facts, counted.rows))
    total = 0.0
    types = np.array(counted.types)
    for kind in np.unique(types):
        flops = float(counted.flops[(types == kind) & parts].sum())
        at = peak_tflops or _tflops(peak, str(kind), facts)
        if at is None:
            return None
        total += flops / at / 1e9
    return total / facts.complete_count


def _tflops(peak: Peak | None, kind: str, facts: RecomputeFacts) -> float | None:
    if peak is None:
        return None
    # Kernels on tensor cores say so in their names; the operators do not.
    if kind == "fp32" and any("tf32" in name for name in facts.trace.names):
        kind = "tf32"
    return peak.tflops.get(kind)


def _peak_words(device: str | None, peak_tflops: float | None) -> str:
    if peak_tflops:
        return "as given"
    peak = peak_of(device)
    return f"{peak.name}, dense: {peak.source}" if peak else ""
