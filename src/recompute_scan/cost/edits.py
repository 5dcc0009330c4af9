"""Changes to the host's time in a trace: stretches that go, shrink or grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recompute_scan.cost.phases import Float64
from recompute_scan.trace.columns import Bool, Int32, Int64


@dataclass(frozen=True)
class Edit:
    """One stretch of one host thread, with what becomes of it.

    Attributes:
        thread: Code of the thread.
        start: Its beginning in the trace, ns.
        end: Its end, ns.
        gone: Whether the work in it goes, with all that it launched.
        add: Time that takes its place (``gone``) or comes on top, ns; may be negative.
    """

    thread: int
    start: int
    end: int
    gone: bool
    add: float = 0.0


@dataclass(frozen=True)
class Edits:
    """Edits of one thread each, in order of time, no two of which overlap."""

    thread: Int64
    start: Int64
    end: Int64
    gone: Bool
    add: Float64

    def of(self, thread: int) -> Edits:
        """Those of one thread."""
        mine = self.thread == thread
        return Edits(
            self.thread[mine], self.start[mine], self.end[mine], self.gone[mine], self.add[mine]
        )

    def removed(self, thread: Int32, time: Int64) -> Bool:
        """For each (thread, time): does it lie in a stretch that goes?"""
        found = np.zeros(len(time), np.bool_)
        for code in np.unique(self.thread):
            edits = self.of(int(code))
            mine = np.flatnonzero(thread == code)
            at = np.searchsorted(edits.start, time[mine], side="right") - 1
            inside = (at >= 0) & (time[mine] < edits.end[at]) & edits.gone[at]
            found[mine[inside]] = True
        return found


def join(edits: Sequence[Edit]) -> Edits:
    """Edits in order; where two overlap, what goes wins over what changes, then the longer.

    What an overlapped edit adds is kept on the one that covers it.
    """
    kept: list[Edit] = []
    order = sorted(edits, key=lambda e: (e.thread, e.start, not e.gone, -e.end))
    for edit in order:
        if edit.end < edit.start:
            continue
        last = kept[-1] if kept and kept[-1].thread == edit.thread else None
        if last is None or edit.start >= last.end:
            kept.append(edit)
        elif last.gone and edit.gone:
            add = max(last.add, edit.add)
            kept[-1] = Edit(edit.thread, last.start, max(last.end, edit.end), True, add)
        elif last.gone:
            if edit.end > last.end:
                kept.append(Edit(edit.thread, last.end, edit.end, False, edit.add))
        else:
            # What goes is cut out of what changes.
            kept[-1] = Edit(last.thread, last.start, edit.start, False, last.add)
            kept.append(edit)
            if edit.gone and last.end > edit.end:
                kept.append(Edit(last.thread, edit.end, last.end, False, 0.0))
    return Edits(
        thread=np.array([e.thread for e in kept], np.int64),
        start=np.array([e.start for e in kept], np.int64),
        end=np.array([e.end for e in kept], np.int64),
        gone=np.array([e.gone for e in kept], np.bool_),
        add=np.array([e.add for e in kept], np.float64),
    )


NOTHING = join(())
