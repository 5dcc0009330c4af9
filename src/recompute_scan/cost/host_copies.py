"""Copies between host and device: how much, from what memory, beside what; and what they are for.

A copy belongs to the step and to the phase in which it was launched. Activations are offloaded
where what goes to the host in the forward passes comes back in the backward passes, in pieces of
the same sizes: torch's ``save_on_cpu``, torchtune's ``OffloadActivations``, Megatron's and
TransformerEngine's offloading, DeepSpeed's ``cpu_checkpointing`` and Unsloth's checkpoints all copy
tensor by tensor. Weights, gradients and optimizer states that live on the host do otherwise: they
come in and never leave in a forward pass, or, where blocks of weights change places, come in during
the forward pass as well. Pieces of sizes that do are not counted as having come back.
"""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import among, distinct, ranked, true_at
from recompute_scan.cost.phases import merged
from recompute_scan.model import StepSpan, step_of
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.roles import Role
from recompute_scan.result import (
    CopyDirection,
    CopyPhase,
    HostCopies,
    HostCopy,
    HostMemory,
    Offload,
)
from recompute_scan.trace.columns import Bool, Int64, Kind
from recompute_scan.units import size

# Kineto's names on CUDA and ROCm, on XPU (where M is the host's), and on ROCm before torch 2.1.
_NAME = re.compile(
    r"Memcpy (?P<source>[HDM])(?:to|2)(?P<target>[HDM])\b"
    r"|Copy(?P<one>[HD])(?:ost|evice)To(?P<other>[HD])(?:ost|evice)$"
)
# A copy that does not say where from and where to.
_UNDIRECTED = "Memcpy"
# The smallest piece of memory that torch's allocator takes from the device (kSmallBuffer in
# c10/core/AllocatorConfig.h): to send less than that away frees nothing.
_LEAST_BYTES = 2 * 1024**2
# Most of what left has to be seen coming back. Not all: what is still under way when the backward
# pass begins, torchtune takes from where it was, and does not read.
_MOST = 0.5
_TO_HOST, _TO_DEVICE = range(2)
_DIRECTIONS: tuple[CopyDirection, ...] = ("to-host", "to-device")
_MEMORIES: tuple[HostMemory, ...] = ("pinned", "pageable", "unknown")
_FORWARD, _BACKWARD, _REST, _UNTOLD = range(4)
_PHASES: tuple[CopyPhase, ...] = ("forward", "backward", "rest", "unknown")
_NS_PER_MS = 1e6


class _Copies(Struct, frozen=True):
    """One entry per copy between host and device, in order of start; times in ns.

    Attributes:
        bytes: -1 where not told.
        direction: Place in ``_DIRECTIONS``; so are ``memory`` and ``phase`` in theirs.
        step: Position of the step, -1 for none.
        alone: For how long no kernel of the same device ran beside it.
        own_stream: Whether no kernel runs on its stream.
    """

    start: Int64
    end: Int64
    bytes: Int64
    direction: Int64
    memory: Int64
    phase: Int64
    step: Int64
    device: Int64
    alone: Int64
    own_stream: Bool

    def __len__(self) -> int:
        return len(self.start)

    def only(self, these: Bool) -> _Copies:
        return _Copies(**{name: getattr(self, name)[these] for name in self.__struct_fields__})


def host_copies(facts: RecomputeFacts) -> HostCopies | None:
    """What goes between host and device; ``None`` where the trace shows no kernels.

    Means over the complete steps; without one, of the whole recording, and no phases are told.
    """
    kernels = facts.kernels
    is_kernel = facts.trace.kind[kernels.event] == Kind.KERNEL
    if not is_kernel.any():
        return None
    steps = [span for span, whole in zip(facts.steps, facts.complete, strict=True) if whole]
    busy = _busy(facts, is_kernel)
    found = _find(facts, steps, is_kernel, busy)
    if steps:
        found = found.only(found.step >= 0)
    number = max(1, len(steps))
    alone = sum(
        _alone(*merged(found.start[mine], found.end[mine]), busy.get(device)).sum()
        for device in distinct(found.device).tolist()
        for mine in [found.device == device]
    )
    length = sum(span.end - span.start for span in steps)
    offload, offloaded, reason = _offload(facts, found, len(steps))
    return HostCopies(
        steps=len(steps),
        copies=_rows(found, number),
        alone_ms=float(alone) / _NS_PER_MS / number,
        alone_pct=100 * float(alone) / length if length else None,
        offload=offload,
        offloaded_bytes=offloaded,
        reason=reason,
    )


def _find(
    facts: RecomputeFacts, steps: list[StepSpan], is_kernel: Bool, busy: dict[int, _Busy]
) -> _Copies:
    trace, kernels = facts.trace, facts.kernels
    names = [_read(name) for name in trace.names]
    direction = np.array([one for one, _ in names], np.int64)[trace.name[kernels.event]]
    at = true_at((direction >= 0) & ~is_kernel)
    event, launch = kernels.event[at], kernels.launch[at]
    start, end = kernels.start[at], kernels.end[at]
    device = _devices(facts)[trace.thread[event]]
    alone = np.zeros(len(at), np.int64)
    for code in distinct(device).tolist():
        mine = device == code
        alone[mine] = _alone(start[mine], end[mine], busy.get(code))
    known = launch >= 0
    asked = start.copy()
    asked[known] = facts.calls.start[launch[known]]
    phase = np.full(len(at), _UNTOLD, np.int64)
    if steps:
        phase[known] = _phase(facts, launch[known])
    return _Copies(
        start=start,
        end=end,
        bytes=trace.bytes[event].astype(np.int64),
        direction=direction[at],
        memory=np.array([memory for _, memory in names], np.int64)[trace.name[event]],
        phase=phase,
        step=step_of(steps, asked),
        device=device,
        alone=alone,
        own_stream=~among(trace.thread[event], trace.thread[kernels.event[is_kernel]]),
    )


def _read(name: str) -> tuple[int, int]:
    """Direction (-1 for none of the two) and host memory of a copy, by its name."""
    match = _NAME.match(name)
    if match is None:
        return -1, 0
    source, target = (match["source"] or match["one"]), (match["target"] or match["other"])
    if (source == "D") == (target == "D"):
        return -1, 0
    memory = 0 if "Pinned" in name else 1 if "Pageable" in name else 2
    return (_TO_HOST if source == "D" else _TO_DEVICE), memory


def _devices(facts: RecomputeFacts) -> Int64:
    """Code of the device of each row of the trace's threads."""
    codes: dict[str, int] = {}
    return np.array(
        [codes.setdefault(place, len(codes)) for place, _ in facts.trace.threads], np.int64
    )


def _phase(facts: RecomputeFacts, launch: Int64) -> Int64:
    """The phase in which each of these launches is.

    The forward pass lasts from each of its operators to what comes next of these and of the nodes
    that autograd runs, the backward pass from node to node of a step; the rest is neither.
    """
    calls, structure = facts.calls, facts.structure
    forward = facts.counts.rows[facts.alignment.backwards > 0]
    rows = np.concatenate((forward, structure.roots))
    rows = rows[calls.start[rows].argsort(kind="stable")]
    is_root = structure.engine[rows] >= 0
    start, time = calls.start[rows], calls.start[launch]
    place = start.searchsorted(time, side="right")
    last, following = np.maximum(place - 1, 0), np.minimum(place, len(rows) - 1)
    ends = np.sort(np.array([span.end for span in facts.steps], np.int64))
    same_step = ends.searchsorted(start[following]) == ends.searchsorted(time)
    goes_on = is_root[following] & (following == place) & same_step
    after_node = np.where(goes_on | (time < calls.end[rows[last]]), _BACKWARD, _REST)
    phase = np.where(is_root[last], after_node, _FORWARD)
    phase[place == 0] = _REST
    phase[structure.engine[launch] >= 0] = _BACKWARD
    top = structure.top[launch]
    phase[(top >= 0) & (structure.role[top] == Role.OPTIMIZER)] = _REST
    return phase


class _Busy:
    """When a device runs kernels."""

    def __init__(self, start: Int64, end: Int64) -> None:
        self._first, self._last = merged(start, end)
        self._before = np.append(0, (self._last - self._first).cumsum())

    def until(self, time: Int64) -> Int64:
        """For how long it ran some before each moment, ns."""
        at = self._first.searchsorted(time, side="right") - 1
        begun = np.maximum(at, 0)
        ran = np.minimum(time, self._last[begun]) - self._first[begun]
        return np.where(at >= 0, self._before[begun] + ran, 0)


def _busy(facts: RecomputeFacts, is_kernel: Bool) -> dict[int, _Busy]:
    kernels = facts.kernels
    event = kernels.event[is_kernel]
    start, end = kernels.start[is_kernel], kernels.end[is_kernel]
    device = _devices(facts)[facts.trace.thread[event]]
    return {
        code: _Busy(start[device == code], end[device == code])
        for code in distinct(device).tolist()
    }


def _alone(start: Int64, end: Int64, busy: _Busy | None) -> Int64:
    """For how long no kernel runs in each of these intervals, ns."""
    if busy is None:
        return end - start
    return end - start - (busy.until(end) - busy.until(start))


def _rows(found: _Copies, number: int) -> tuple[HostCopy, ...]:
    """One row for each direction, kind of host memory and phase; means over so many steps."""
    kinds = (found.direction * len(_MEMORIES) + found.memory) * len(_PHASES) + found.phase
    rows = []
    for kind in distinct(kinds).tolist():
        mine = found.only(kinds == kind)
        told = (mine.bytes >= 0).all()
        rows.append(
            HostCopy(
                direction=_DIRECTIONS[mine.direction[0]],
                memory=_MEMORIES[mine.memory[0]],
                phase=_PHASES[mine.phase[0]],
                count=len(mine) / number,
                bytes=float(mine.bytes.sum(dtype=np.float64)) / number if told else None,
                time_ms=float((mine.end - mine.start).sum()) / _NS_PER_MS / number,
                alone_ms=float(mine.alone.sum()) / _NS_PER_MS / number,
                own_stream=bool(mine.own_stream.all()),
            )
        )
    return tuple(rows)


def _offload(
    facts: RecomputeFacts, found: _Copies, steps: int
) -> tuple[Offload, float | None, str | None]:
    """Whether activations are offloaded, their bytes in a step, and why it cannot be told."""
    if not steps:
        return "untold", None, "No step of the trace shows a forward pass with its backward pass."
    event = facts.kernels.event
    called = facts.trace.names.index(_UNDIRECTED) if _UNDIRECTED in facts.trace.names else -1
    if (facts.trace.name[event] == called).any():
        return "untold", None, "Copies do not say where they come from and where they go."
    leaves = found.direction == _TO_HOST
    if (found.bytes[leaves] < 0).any():
        return "untold", None, "The trace does not say how many bytes copies move."
    if _bytes(found, leaves & (found.phase == _UNTOLD)) >= _LEAST_BYTES * steps:
        return "untold", None, "The launches of copies to the host are not in the trace."
    out = leaves & (found.phase == _FORWARD)
    sent = _bytes(found, out) / steps
    if sent < _LEAST_BYTES:
        return "none", None, None
    returned = _returned(found, out) / steps
    if returned >= max(_LEAST_BYTES, _MOST * sent):
        return "seen", returned, None
    return (
        "untold",
        None,
        f"In the forward passes of a step {size(sent)} go to the host, and {size(returned)} of it "
        "come back in the backward passes in pieces of the same sizes.",
    )


def _bytes(found: _Copies, these: Bool) -> float:
    return float(found.bytes[these].sum(dtype=np.float64))


def _returned(found: _Copies, out: Bool) -> float:
    """Bytes of what left that come back in the backward passes of its step, size by size."""
    sizes, place = ranked(np.maximum(found.bytes, 0))
    keys, at = ranked(found.step * len(sizes) + place)

    def times(these: Bool) -> Int64:
        return np.bincount(at[these], minlength=len(keys))

    came = found.direction == _TO_DEVICE
    beyond = times(came & (found.phase == _BACKWARD)) - times(came & (found.phase == _FORWARD))
    back = np.minimum(times(out), np.maximum(beyond, 0))
    return float((back * sizes[keys % len(sizes)].astype(np.float64)).sum())
