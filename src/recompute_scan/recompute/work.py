"""How long each call kept its device busy, and which recomputed operators really ran."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.roles import Structure
from recompute_scan.trace.calls import Calls, Kernels
from recompute_scan.trace.columns import Bool, Int32, Int64, Kind


class Work(Struct, frozen=True):
    """Per call: what it and all inside it cost.

    Attributes:
        time: ns; time of the kernels it launched where the trace has a GPU, else its own
            duration on the host.
        kernels: Number of kernels it launched.
        on_gpu: Whether ``time`` is kernel time.
        unlaunched: Kernels without a record of their launch: belonging to no call.
        queued: Of these, those that were launched before recording began: belonging to no step.
    """

    time: Int64
    kernels: Int32
    on_gpu: bool
    unlaunched: int
    queued: int


def measure(structure: Structure, kernels: Kernels) -> Work:
    """The work of every call that is a top (see ``Structure.top``)."""
    calls = structure.calls
    launched = kernels.launch >= 0
    unlaunched, queued = int((~launched).sum()), int(kernels.queued.sum())
    if not launched.any():
        # One zero, read as many.
        none = np.broadcast_to(np.int32(0), len(calls))
        return Work(calls.duration, none, False, unlaunched, queued)
    count = np.zeros(len(calls), np.int32)
    time = np.zeros(len(calls), np.int64)
    top = structure.top[kernels.launch[launched]]
    known = top >= 0
    np.add.at(count, top[known], 1)
    np.add.at(time, top[known], kernels.time[launched][known])
    return Work(time, count, True, unlaunched, queued)


class Ran:
    """Tells whether an operator of a recompute did the work of its first run.

    Early stop interrupts the last operator of a recompute; selective checkpointing returns saved
    results. ``neutral`` calls are bookkeeping that costs nothing.
    """

    def __init__(self, calls: Calls, work: Work, neutral: Bool) -> None:
        self._calls = calls
        self._work = work
        self._neutral = neutral

    def of(self, original: Int64, again: Int64, ends: Int64, whole: Bool) -> Bool:
        """For each operator of all recomputes: did it?

        Args:
            original: Rows of first runs.
            again: Rows of the same operators' second runs.
            ends: For each recompute, where its last operator is in these.
            whole: For each recompute: early stop cannot have cut it.
        """
        both = np.concatenate((original, again))
        twin = twins_of(self._calls)
        first_twins, twins = np.split(self._calls.holding(twin & ~self._neutral, both), 2)
        ran = np.asarray(twins >= first_twins)
        if not ran.all():  # selective checkpoints alone have twins
            ran |= self._without_mode(twin, both, ends)
        if self._work.on_gpu:
            kernels = self._work.kernels
            return np.asarray(ran & ((kernels[original] == 0) | (kernels[again] > 0)))
        name = self._calls.name
        last, first_run = again[ends], original[ends]
        for at in np.flatnonzero(~whole & (name[last] == name[first_run])):
            ran[ends[at]] &= self._ended(int(last[at]), int(first_run[at]))
        return ran

    def _without_mode(self, twin: Bool, both: Int64, ends: Int64) -> Bool:
        """For each operator: does its recompute run all that the first run did, and no mode?

        A reentrant checkpoint inside a selective one goes through its block once more by itself.
        Some operator has to show it: a saved one without operators inside looks the same.
        """
        calls = self._calls
        first_twins, twins = np.split(calls.holding(twin, both), 2)
        # The mode detaches what it keeps, and so do the hooks of saved tensors.
        operator = (calls.kind == Kind.OP) & ~calls.where(vocabulary.DISPATCH_MODE.__eq__)
        operator &= ~self._neutral
        first, again = np.split(calls.holding(operator, both), 2)
        lengths = np.diff(ends, prepend=-1)
        whole = again >= first - first_twins
        whole[ends[lengths > 1]] = True  # early stop may have cut it
        number = np.arange(len(ends)).repeat(lengths)
        lacking = np.bincount(number, weights=twins + ~whole, minlength=len(ends))
        shown = np.bincount(number, (first > first_twins) & (again > 0), minlength=len(ends))
        return np.asarray(((lacking == 0) & (shown > 0))[number])

    def _ended(self, last: int, first_run: int) -> bool:
        """Did the last operator of a recompute do half the work of its first run, or more?

        Early stop interrupts the last operator inside it. ``aten::gru`` has hundreds.
        """
        done, whole = self._innermost(last), self._innermost(first_run)
        return done >= whole or 2 * (done - 1) >= whole

    def _innermost(self, row: int) -> int:
        """Operators inside this call with none in them.

        A recompute detaches, inside its operators, what it recomputed: that does not count.
        """
        stop = row + 1 + self._calls.size[row]
        counted = row + 1 + np.flatnonzero(~self._neutral[row + 1 : stop])
        following = np.append(counted[1:], stop)
        return int(np.count_nonzero(following > counted + self._calls.size[counted]))


def twins_of(calls: Calls) -> Bool:
    """For each call: is it an operator that stands directly in one of the same name?

    A dispatch mode, which selective checkpointing uses, records each operator twice, one in
    the other (since torch 2.13 with a range between); one that returns a saved result has
    no inner one.
    """
    mode = calls.where(vocabulary.DISPATCH_MODE.__eq__)
    above = np.maximum(calls.parent, 0)
    beyond = np.flatnonzero(mode[above] & (calls.parent[above] >= 0))
    above[beyond] = calls.parent[above[beyond]]
    twin = (calls.parent >= 0) & (calls.name == calls.name[above]) & (calls.kind == Kind.OP)
    return np.asarray(twin)
