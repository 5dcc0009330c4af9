"""Where recomputes end: early stop.

A non-reentrant recompute ends at the last tensor that its first run saved, unless early stop is
switched off (``torch/utils/checkpoint.py``, ``set_checkpoint_early_stop``); a reentrant one, or a
reentrant checkpoint inside it, runs to its end. So what the one that stays will leave out, once the
others are gone, did run in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recompute_scan.annotations import EARLY_STOP_OFF, SELECTIVE
from recompute_scan.cost.clock import TimeEdit
from recompute_scan.cost.gradients import HookedEdit, Recordings
from recompute_scan.cost.reruns import OpSequence
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.result import Checkpoint

# Of a recompute, what ending it by an exception takes at most.
_MOST_STOP = 0.25


def find_early_stop(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> bool | None:
    """Whether non-reentrant recomputes stop early; ``None`` where nothing shows it.

    Annotations say where it is off. Without them one is seen to stop where its last operator was
    entered and did nothing. One is seen to run on where a further non-reentrant checkpoint is right
    inside and ran, too: all that is saved there are its inputs, which are there before it begins.
    """
    if facts.annotations is not None:
        return True
    alignment = facts.alignment
    times = np.bincount(alignment.places, minlength=len(alignment.forward))
    for sequence in sequences:
        recompute = alignment.recomputes[sequence.recompute]
        kinds = [each.variant == "non-reentrant" for each in sequence.checkpoints]
        known = sequence.run < sequence.runs == len(kinds)
        if not known or not kinds[sequence.run] or sequence.stop < len(recompute.again):
            continue
        if recompute.ran[:-1].all() and not recompute.ran[-1]:
            return True
        edges = alignment.forward.searchsorted(recompute.original[[sequence.first, -1]])
        if any(kinds[sequence.run + 1 : sequence.run + 2]) and times[edges[0]] == times[edges[1]]:
            return False
    return None


def stopped(
    facts: RecomputeFacts, recordings: Recordings, sequence: OpSequence, kept: Checkpoint | None
) -> HookedEdit | None:
    """The end of a recompute that stays, if nothing inside keeps it from stopping early any more.

    Args:
        facts: What ran again.
        recordings: The runs with gradients.
        sequence: The recompute.
        kept: Of the checkpoints around it, the one that stays.
    """
    recompute = facts.alignment.recomputes[sequence.recompute]
    if kept is None or kept.variant != "non-reentrant" or sequence.stop < len(recompute.again):
        return None
    known = {EARLY_STOP_OFF, SELECTIVE} & {*kept.options}
    if known or sequence.checkpoints[-1].variant != "reentrant":
        return None
    calls = facts.calls
    rows, originals = (
        each[sequence.first : sequence.stop] for each in (recompute.again, recompute.original)
    )
    stop = recordings.stop(rows, recordings.of(rows, originals))
    function = int(facts.structure.function[rows[-1]])
    end = max(int(calls.end[rows[-1]]), int(calls.end[function]) if function >= 0 else 0)
    if stop is None or stop >= end:
        return None
    # An exception passes no more frames than the run had time for.
    most = _MOST_STOP * float(calls.end[rows[-1]] - calls.start[rows[0]])
    thread = int(calls.thread[rows[-1]])
    return lambda hooks, _: TimeEdit(thread, stop, end, gone=True, add=min(hooks.stop_ns, most))
