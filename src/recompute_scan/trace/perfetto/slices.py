"""The slices of a trace under way: what begins and ends on tracks, packet by packet.

A track's slices nest, and an end closes the one that was opened last. The writer in torch
(``torch/csrc/profiler/cupti/monitor_pftrace.cpp``) puts the beginnings of many slices first and
then their ends in the same order, not in that of time: read by time alone, neighbours that touch
would lose their ends to each other. So where a file is written like that, the order counts.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from msgspec.structs import replace

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Kind
from recompute_scan.trace.health import MOST_NUMBERS, Numbering
from recompute_scan.trace.perfetto.debug_annotations import DebugAnnotations
from recompute_scan.trace.perfetto.interned import EVENT_NAME, InternedNames
from recompute_scan.trace.perfetto.kinds import CONVOLUTION, Marks, slice_kinds, traits
from recompute_scan.trace.perfetto.messages import Gathered, PackedRun
from recompute_scan.trace.perfetto.shapes import Shapes
from recompute_scan.trace.perfetto.wire import Bytes, Spans

OPEN = -(2**63)
# Field numbers in TrackEvent, and its types of use.
_TYPE, _TRACK, _NAME_IID, _NAME, _ANNOTATIONS = 9, 11, 10, 23, 4
_BEGIN, _END = 1, 2


class Slices:
    """Collects the beginnings and ends of slices.

    Args:
        names: Texts that the file numbers.
        shapes: Numbers those of inputs.

    Attributes:
        numbering: How many events the recording had, and how many came by.
        edges: For each beginning and end in the order of the file: track, time in ns, which.
        columns: For each beginning: kind, name, sequence, correlation, stream, bytes, shapes.
    """

    def __init__(self, names: InternedNames, shapes: Shapes) -> None:
        self.numbering = Numbering()
        self.edges: list[tuple[Int64, Int64, Bool]] = []
        self.columns: list[tuple[Int8, Int32, Int64, Int64, Int32, Int64, Int32]] = []
        self._names = names
        self._shapes = shapes
        self._traits = bytearray()

    def take(self, run: PackedRun, events: Gathered) -> int:
        """Take in ``track_event`` of some packets.

        Args:
            run: The packets.
            events: The fields of their events; ``message`` is the packet.

        Returns:
            How many begin or end nothing: instants and counters.
        """
        number = len(run.time)
        kind = events.numbers(_TYPE, number)
        begins = kind == _BEGIN
        edge = true_at(begins | (kind == _END))
        track = events.numbers(_TRACK, number)
        self.edges.append((track[edge], run.time[edge], begins[edge]))
        opened = true_at(begins)
        if len(opened):
            row_of = np.full(number, -1, np.int64)
            row_of[opened] = np.arange(len(opened))
            iid = events.numbers(_NAME_IID, number)[opened]
            packet = run.first + opened
            code = self._names.resolve(EVENT_NAME, run.sequence[opened], iid, packet)
            self._name_inline(run.data, events.pick(_NAME), row_of, code)
            beside = events.pick(_ANNOTATIONS)
            beside = replace(beside, message=row_of[beside.message])
            if (beside.message < 0).any():
                beside = beside.rows(true_at(beside.message >= 0))
            self._begin(run.data, DebugAnnotations(run.data, beside, len(opened)), code)
        return events.messages - len(edge)

    def _name_inline(self, data: Bytes, named: Spans, row_of: Int64, code: Int64) -> None:
        for packet, start, end in named.each():
            if (row := row_of[packet]) >= 0:
                code[row] = self._names.code(data.raw[start:end])

    def _begin(self, data: Bytes, beside: DebugAnnotations, code: Int64) -> None:
        sequence, stream = beside.numbers("Sequence number"), beside.numbers("stream")
        correlation, counted = beside.numbers("correlation"), beside.numbers("Ev Idx")
        wait = beside.has("cuda_sync_kind")
        dims = beside.spans("Input Dims")
        marks = Marks(
            python=beside.has("Python id"),
            call=beside.has("cbid"),
            device=(stream >= 0) & ~wait & beside.has("device"),
            wait=wait,
            recorded=beside.has("Record function id", counted >= 0),
            numbered=beside.has("Fwd thread id", sequence >= 0),
            shaped=dims[1] > 0,
        )
        new = islice(self._names.texts, len(self._traits), None)
        self._traits.extend(map(traits, new))
        named = np.frombuffer(bytes(self._traits), np.uint8)[code]
        numbered = counted[(counted >= 0) & (counted < MOST_NUMBERS)]
        self.numbering.join(len(numbered), int(numbered.max(initial=-1)) + 1)
        kinds = slice_kinds(named, marks)
        copies = kinds == Kind.COPY
        moved = np.where(copies, beside.numbers("bytes"), -1)
        self.columns.append(
            (
                kinds,
                code.astype(np.int32),
                sequence,
                correlation,
                np.where((stream >= 0) & (stream < 2**31), stream, -1).astype(np.int32),
                moved,
                self._shapes.codes(data.raw, beside, dims, (named & CONVOLUTION) > 0),
            )
        )


def pair(track: Int64, time: Int64, begins: Bool) -> Int64:
    """When each slice that begins here ends, :data:`OPEN` for one that does not.

    Args:
        track: Of each beginning and end, in the order of the file.
        time: ns.
        begins: Which are beginnings.

    Returns:
        One entry for each beginning.
    """
    if not len(track):
        return np.zeros(0, np.int64)
    if _runs_back(track, time) or _runs_back(*_by_track(track, time)):
        ends = _in_blocks(track, time, begins)
        if ends is not None:
            return ends
    return _by_time(track, time, begins)


def _runs_back(track: Int64, time: Int64) -> bool:
    """Whether one is earlier than the one before it, on the same track."""
    return bool(((track[1:] == track[:-1]) & (time[1:] < time[:-1])).any())


def _by_track(track: Int64, time: Int64) -> tuple[Int64, Int64]:
    order = track.argsort(kind="stable")
    return track[order], time[order]


def _in_blocks(track: Int64, time: Int64, begins: Bool) -> Int64 | None:
    """Ends of slices written in blocks; ``None`` where they are not. The last may be cut."""
    borders = true_at(begins[1:] != begins[:-1]) + 1
    lengths = np.diff(np.concatenate([[0], borders, [len(begins)]]))
    if not begins[0]:
        return None
    opened, closed = lengths[::2], lengths[1::2]
    if len(closed) < len(opened):
        closed = np.append(closed, 0)
    if (opened[:-1] != closed[:-1]).any() or closed[-1] > opened[-1]:
        return None
    started, ended = true_at(begins), true_at(~begins)
    closes = started[: len(ended)]
    if (track[closes] != track[ended]).any() or (time[ended] < time[closes]).any():
        return None
    found = np.full(len(started), OPEN, np.int64)
    found[: len(ended)] = time[ended]
    return found


def _by_time(track: Int64, time: Int64, begins: Bool) -> Int64:
    number = begins.cumsum() - 1
    found = np.full(int(begins.sum()), OPEN, np.int64)
    stack: list[int] = []
    last = None
    order = np.lexsort((time, track))
    for each, at, opens, row in zip(
        track[order].tolist(),
        time[order].tolist(),
        begins[order].tolist(),
        number[order].tolist(),
        strict=True,
    ):
        if each != last:
            stack, last = [], each
        if opens:
            stack.append(row)
        elif stack:
            found[stack.pop()] = at
    return found
