"""Finding the forward pass again inside the backward pass: the proof that a call is a replay.

The operators that a backward pass runs where a replay can stand (candidates) form one stretch
per node. Each stretch is cut, from its end, into the longest runs that stand just so (same
names, shapes and types, in the same order) in the forward pass. Three facts say where:

* a checkpoint function's node has the sequence number of the call in the forward pass, and
  the replay lies within that call;
* any other node has the sequence number of the operator whose gradient it computes, and a
  replay that it asked for ends there or close by;
* identical layers are told apart by these two, never by their order alone.

What stands nowhere in the forward pass is no replay and is returned as unexplained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.matching import Matcher, Replay
from recompute_scan.recompute.readings import Endings, Reading, correct
from recompute_scan.recompute.structure import OperatorCodes, Role, Structure
from recompute_scan.recompute.work import Work
from recompute_scan.trace.columns import Bool, Int64

# What sets some stretches right can show that others were read wrongly.
_CORRECTIONS = 6


@dataclass(frozen=True)
class Alignment:
    """Every replay of a trace, and the candidates that no part of the forward explains.

    Attributes:
        forward: Rows of all forward operators, in order of (thread, time); costless ones left
            out.
        backwards: One entry per forward row: how many backward passes went through it; 0 for
            an operator without gradients, or whose backward is not in the trace.
        replays: In order of time.
        unexplained: Rows of candidates that match nothing.
    """

    forward: Int64
    backwards: Int64
    replays: tuple[Replay, ...]
    unexplained: Int64


def align(calls: Calls, structure: Structure, work: Work, starts: Int64) -> Alignment:
    """Match every candidate stretch with the forward pass.

    Args:
        calls: The trace's calls.
        structure: Their roles.
        work: Their work on the device; tells operators that were entered but did nothing.
        starts: Start of each step in ns, ascending; a replay repeats work of its own step.
    """
    neutral = calls.matching(words.NEUTRAL)[calls.name]
    forward = np.flatnonzero((structure.role == Role.FORWARD) & ~neutral)
    candidates = np.flatnonzero((structure.role == Role.CANDIDATE) & ~neutral)
    matcher = Matcher(calls, structure, work, forward, neutral)
    stretches = _stretches(calls, structure, candidates)
    endings = Endings({})
    replays, unexplained = _match_all(matcher, stretches, starts, endings)
    for _ in range(_CORRECTIONS):
        corrected = correct(endings, _readings(matcher, stretches, replays))
        if corrected == endings:
            break
        endings = corrected
        replays, unexplained = _match_all(matcher, stretches, starts, endings)
    return Alignment(
        forward=forward,
        backwards=matcher.anchors.backwards,
        replays=tuple(replays),
        unexplained=np.concatenate([*unexplained, candidates[:0]]),
    )


def _match_all(
    matcher: Matcher, stretches: list[Int64], starts: Int64, endings: Endings
) -> tuple[list[Replay], list[Int64]]:
    """Replays of all stretches, in order of time, and what is left of each stretch."""
    calls, structure = matcher.calls, matcher.structure
    replays: list[Replay] = []
    unexplained: list[Int64] = []
    for stretch in stretches:
        engine = int(structure.engine[stretch[0]])
        step = int(np.searchsorted(starts, calls.start[engine], side="right")) - 1
        begin = int(starts[step]) if step >= 0 else 0
        found = matcher.match(stretch, engine, begin, endings)
        matched = np.concatenate([replay.again for replay in found] or [stretch[:0]])
        if 2 * len(matched) < len(stretch):
            unexplained.append(stretch)
            continue
        for replay in found:
            matcher.anchors.remember(replay.again, replay.original)
        replays.extend(found)
        unexplained.append(np.setdiff1d(stretch, matched, assume_unique=True))
    return replays, unexplained


def _readings(matcher: Matcher, stretches: list[Int64], replays: list[Replay]) -> list[Reading]:
    """What stretches with an expected end were taken for."""
    of_engine: dict[int, list[Replay]] = defaultdict(list)
    for replay in replays:
        of_engine[replay.engine].append(replay)
    keeping = Keeping(matcher.calls, matcher.code, replays)
    later = np.zeros(len(matcher.forward), np.bool_)
    readings = []
    for stretch in reversed(stretches):
        engine = int(matcher.structure.engine[stretch[0]])
        spans = []
        forgotten = []
        for replay in reversed(of_engine[engine]):
            places = np.searchsorted(matcher.forward, replay.original)
            spans.append((int(places.min()), int(places.max())))
            forgotten.append(keeping.forgotten(replay, places, later))
            later[places] = True
        anchor = matcher.anchors.find(engine) if spans else None
        if anchor is not None:
            readings.append(
                Reading(
                    operators=matcher.code[stretch],
                    expected=anchor.last,
                    replays=tuple(reversed(spans)),
                    asked=not matcher.structure.checkpoint_node[engine],
                    forgotten=max((p for p in forgotten if p is not None), default=None),
                )
            )
    return readings[::-1]


def _stretches(calls: Calls, structure: Structure, candidates: Int64) -> list[Int64]:
    """Candidates by the engine range they ran in, in order of time."""
    engines = structure.engine[candidates]
    order = np.lexsort((candidates, calls.start[engines]))
    rows = candidates[order]
    edges = np.flatnonzero(np.diff(structure.engine[rows])) + 1
    return [part for part in np.split(rows, edges) if len(part)]


class Keeping:
    """Tells which operators of a replay gave up what they save.

    A non-reentrant checkpoint that is replayed keeps each tensor that an operator saves, detached
    inside that operator; not those of operators in a further checkpoint within, which keeps
    nothing but its inputs until it is replayed itself (``torch/utils/checkpoint.py``,
    ``_recomputation_hook``). Operators that save nothing tell nothing.
    """

    def __init__(self, calls: Calls, code: OperatorCodes, replays: Sequence[Replay]) -> None:
        detach = np.array([name == words.DETACH for name in calls.names], np.bool_)[calls.name]
        self._before = np.concatenate(([0], np.cumsum(detach, dtype=np.int32)))
        self._size = calls.size
        again = np.concatenate([*(replay.again for replay in replays), np.zeros(0, np.int64)])
        codes = code[again]
        self._saving = np.zeros(len(calls), np.bool_)
        self._saving[again] = np.isin(codes, codes[self._detaches(again)])

    def forgotten(self, replay: Replay, places: Int64, later: Bool) -> int | None:
        """The last place that a replay gave up for good, ``None`` for none.

        Operators that save nothing share the fate of the one before them.

        Args:
            replay: The replay.
            places: Places of its operators in the forward pass.
            later: For each place: was it replayed after this one?
        """
        saving = self._saving[replay.again]
        lost = np.flatnonzero(saving & ~self._detaches(replay.again) & ~later[places])
        if not len(lost):
            return None
        behind = np.flatnonzero(saving[lost[-1] + 1 :])
        return int(places[lost[-1] + behind[0]] if len(behind) else places[-1])

    def _detaches(self, rows: Int64) -> Bool:
        inside = self._before[rows + self._size[rows] + 1] - self._before[rows + 1]
        return np.asarray(inside > 0)
