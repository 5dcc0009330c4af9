"""Finding the forward pass again inside the backward pass: the proof that a call is a recompute.

The operators that a backward pass runs where a recompute can stand (candidates) form one sequence
per node. Each sequence is cut, from its end, into the longest runs that stand just so (same
names, shapes and types, in the same order) in the forward pass. Three facts say where:

* a checkpoint function's node has the sequence number of the call in the forward pass, and
  the recompute lies within that call;
* any other node has the sequence number of the operator whose gradient it computes, and a
  recompute that it asked for ends there or close by;
* identical layers are told apart by these two, never by their order alone.

What stands nowhere in the forward pass is no recompute and is returned as unexplained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.matching import Matcher, Recompute
from recompute_scan.recompute.readings import Endings, Reading, correct
from recompute_scan.recompute.structure import OperatorCodes, Role, Structure
from recompute_scan.recompute.work import Work
from recompute_scan.trace.columns import Bool, Int64

# What sets some sequences right can show that others were read wrongly.
_CORRECTIONS = 6


@dataclass(frozen=True)
class Alignment:
    """Every recompute of a trace, and the candidates that no part of the forward explains.

    Attributes:
        forward: Rows of all forward operators, in order of (thread, time); costless ones left
            out.
        backwards: One entry per forward row: how many backward passes went through it; 0 for
            an operator without gradients, or whose backward is not in the trace.
        recomputes: In order of time.
        unexplained: Rows of candidates that match nothing.
    """

    forward: Int64
    backwards: Int64
    recomputes: tuple[Recompute, ...]
    unexplained: Int64


def align(calls: Calls, structure: Structure, work: Work, starts: Int64) -> Alignment:
    """Match every candidate sequence with the forward pass.

    Args:
        calls: The trace's calls.
        structure: Their roles.
        work: Their work on the device; tells operators that were entered but did nothing.
        starts: Start of each step in ns, ascending; a recompute repeats work of its own step.
    """
    neutral = calls.matching(words.NEUTRAL)[calls.name]
    forward = np.flatnonzero((structure.role == Role.FORWARD) & ~neutral)
    candidates = np.flatnonzero((structure.role == Role.CANDIDATE) & ~neutral)
    matcher = Matcher(calls, structure, work, forward, neutral)
    sequences = _op_sequences(calls, structure, candidates)
    endings = Endings({})
    recomputes, unexplained = _match_all(matcher, sequences, starts, endings)
    for _ in range(_CORRECTIONS):
        corrected = correct(endings, _readings(matcher, sequences, recomputes))
        if corrected == endings:
            break
        endings = corrected
        recomputes, unexplained = _match_all(matcher, sequences, starts, endings)
    return Alignment(
        forward=forward,
        backwards=matcher.anchors.backwards,
        recomputes=tuple(recomputes),
        unexplained=np.concatenate([*unexplained, candidates[:0]]),
    )


def _match_all(
    matcher: Matcher, sequences: list[Int64], starts: Int64, endings: Endings
) -> tuple[list[Recompute], list[Int64]]:
    """Recomputes of all sequences, in order of time, and what is left of each sequence."""
    calls = matcher.calls
    recomputes: list[Recompute] = []
    unexplained: list[Int64] = []
    is_matched = np.zeros(len(calls), np.bool_)
    engines = matcher.structure.engine[[sequence[0] for sequence in sequences]]
    steps = np.searchsorted(starts, calls.start[engines], side="right")
    begins = np.concatenate(([0], starts))[steps]
    for sequence, engine, begin in zip(sequences, engines.tolist(), begins.tolist(), strict=True):
        found = matcher.match(sequence, engine, begin, endings)
        matched = np.concatenate([recompute.again for recompute in found] or [sequence[:0]])
        if 2 * len(matched) < len(sequence):
            unexplained.append(sequence)
            continue
        for recompute in found:
            matcher.anchors.remember(recompute.again, recompute.original)
        recomputes.extend(found)
        is_matched[matched] = True
        unexplained.append(sequence[~is_matched[sequence]])
    return recomputes, unexplained


def _readings(
    matcher: Matcher, sequences: list[Int64], recomputes: list[Recompute]
) -> list[Reading]:
    """What sequences with an expected end were taken for."""
    of_engine: dict[int, list[Recompute]] = defaultdict(list)
    for recompute in recomputes:
        of_engine[recompute.engine].append(recompute)
    keeping = Keeping(matcher.calls, matcher.code, recomputes)
    later = np.zeros(len(matcher.forward), np.bool_)
    readings = []
    for sequence in reversed(sequences):
        engine = int(matcher.structure.engine[sequence[0]])
        spans = []
        forgotten = []
        for recompute in reversed(of_engine[engine]):
            places = matcher.forward.searchsorted(recompute.original)
            spans.append((int(places.min()), int(places.max())))
            forgotten.append(keeping.forgotten(recompute, places, later))
            later[places] = True
        anchor = matcher.anchors.find(engine) if spans else None
        if anchor is not None:
            readings.append(
                Reading(
                    operators=matcher.code[sequence],
                    expected=anchor.last,
                    recomputes=tuple(reversed(spans)),
                    asked=not matcher.structure.checkpoint_node[engine],
                    forgotten=max((p for p in forgotten if p is not None), default=None),
                )
            )
    return readings[::-1]


def _op_sequences(calls: Calls, structure: Structure, candidates: Int64) -> list[Int64]:
    """Candidates by the engine range they ran in, in order of time."""
    engines = structure.engine[candidates]
    order = np.lexsort((candidates, calls.start[engines]))
    rows = candidates[order]
    edges = np.flatnonzero(np.diff(structure.engine[rows])) + 1
    return [part for part in np.split(rows, edges) if len(part)]


class Keeping:
    """Tells which operators of a recompute gave up what they save.

    A non-reentrant checkpoint that is recomputed keeps each tensor that an operator saves, detached
    inside that operator; not those of operators in a further checkpoint within, which keeps
    nothing but its inputs until it is recomputed itself (``torch/utils/checkpoint.py``,
    ``_recomputation_hook``). Operators that save nothing tell nothing.
    """

    def __init__(self, calls: Calls, code: OperatorCodes, recomputes: Sequence[Recompute]) -> None:
        detach = np.array([name == words.DETACH for name in calls.names], np.bool_)[calls.name]
        self._before = np.concatenate(([0], np.cumsum(detach, dtype=np.int32)))
        self._size = calls.size
        again = np.concatenate(
            [*(recompute.again for recompute in recomputes), np.zeros(0, np.int64)]
        )
        codes = code[again]
        self._saving = np.zeros(len(calls), np.bool_)
        self._saving[again] = np.isin(codes, codes[self._detaches(again)])

    def forgotten(self, recompute: Recompute, places: Int64, later: Bool) -> int | None:
        """The last place that a recompute gave up for good, ``None`` for none.

        Operators that save nothing share the fate of the one before them.

        Args:
            recompute: The recompute.
            places: Places of its operators in the forward pass.
            later: For each place: was it recomputed after this one?
        """
        saving = self._saving[recompute.again]
        lost = np.flatnonzero(saving & ~self._detaches(recompute.again) & ~later[places])
        if not len(lost):
            return None
        behind = np.flatnonzero(saving[lost[-1] + 1 :])
        return int(places[lost[-1] + behind[0]] if len(behind) else places[-1])

    def _detaches(self, rows: Int64) -> Bool:
        inside = self._before[rows + self._size[rows] + 1] - self._before[rows + 1]
        return np.asarray(inside > 0)
