"""The slices of a trace under way: what begins and ends on tracks, packet by packet.

A track's slices nest, and an end closes the one that was opened last. The writer in torch
(``torch/csrc/profiler/cupti/monitor_pftrace.cpp``) puts the beginnings of many slices first and
then their ends in the same order, not in that of time: read by time alone, neighbours that touch
would lose their ends to each other. So where a file is written like that, the order counts.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Kind
from recompute_scan.trace.health import Numbering
from recompute_scan.trace.limits import Limits, refuse_distinct
from recompute_scan.trace.perfetto.debug_annotations import DebugAnnotations, json_text
from recompute_scan.trace.perfetto.interned import EVENT_NAME, InternedNames
from recompute_scan.trace.perfetto.kinds import Marks, slice_kinds
from recompute_scan.trace.perfetto.wire import LENGTH, Bytes, Fields, PackedRun

OPEN = -(2**63)
# Field numbers in TrackEvent, and its types of use.
_TYPE, _TRACK, _NAME_IID, _NAME, _ANNOTATIONS = 9, 11, 10, 23, 4
_BEGIN, _END = 1, 2
_CONVOLUTION = "convolution"
# Where something begins and ends, for each event.
_Spans = tuple[Int64, Int64]


class Slices:
    """Collects the beginnings and ends of slices.

    Args:
        names: Texts that the file numbers.
        source: The file's name, for messages.
        limits: Bounds on distinct shapes.

    Attributes:
        signatures: Code of each distinct shape; the first is empty.
        numbering: How many events the recording had, and how many came by.
        edges: For each beginning and end in the order of the file: track, time in ns, which.
        columns: For each beginning: kind, name, sequence, correlation, stream, bytes, shapes.
    """

    def __init__(self, names: InternedNames, source: str, limits: Limits) -> None:
        self.signatures: dict[bytes, int] = {b"": 0}
        self.numbering = Numbering()
        self.edges: list[tuple[Int64, Int64, Bool]] = []
        self.columns: list[tuple[Int8, Int32, Int64, Int64, Int32, Int64, Int32]] = []
        self._names = names
        self._source = source
        self._limits = limits
        self._known: dict[tuple[bytes | None, ...], int] = {}

    def take(self, run: PackedRun, events: Fields) -> int:
        """Take in ``track_event`` of some packets, in the order of the file.

        Args:
            run: The packets.
            events: One row for each; ``message`` is the packet.

        Returns:
            How many begin or end nothing: instants and counters.
        """
        number = len(events.message)
        fields = run.gather(events)
        kind = fields.numbers(_TYPE, number)
        edge = true_at((kind == _BEGIN) | (kind == _END))
        track = fields.numbers(_TRACK, number)
        begins = kind[edge] == _BEGIN
        packet = events.message
        self.edges.append((track[edge], run.time[packet[edge]], begins))
        opened = edge[begins]
        if len(opened):
            row_of = np.full(number, -1, np.int64)
            row_of[opened] = np.arange(len(opened))
            code = self._names.resolve(
                EVENT_NAME,
                run.sequence[packet[opened]],
                fields.numbers(_NAME_IID, number)[opened],
                run.first + packet[opened],
            )
            self._name_inline(run.data, fields.pick(_NAME, LENGTH), row_of, code)
            beside = fields.pick(_ANNOTATIONS, LENGTH)
            beside = beside.rows(true_at(row_of[beside.message] >= 0))
            beside = replace(beside, message=row_of[beside.message])
            self._begin(run.data, DebugAnnotations(run.data, beside, len(opened)), code)
        return number - len(edge)

    def _name_inline(self, data: Bytes, named: Fields, row_of: Int64, code: Int64) -> None:
        for row, start, end in zip(
            row_of[named.message].tolist(), named.start.tolist(), named.end.tolist(), strict=True
        ):
            if row >= 0:
                code[row] = self._names.code(data.raw[start:end])

    def _begin(self, data: Bytes, beside: DebugAnnotations, code: Int64) -> None:
        dims, types = beside.spans("Input Dims"), beside.spans("Input type")
        sequence, stream = beside.numbers("Sequence number"), beside.numbers("stream")
        correlation, counted = beside.numbers("correlation"), beside.numbers("Ev Idx")
        wait = beside.has("cuda_sync_kind")
        marks = Marks(
            python=beside.has("Python id"),
            call=beside.has("cbid"),
            device=(stream >= 0) & ~wait & beside.has("device"),
            wait=wait,
            recorded=(counted >= 0) | beside.has("Record function id"),
            numbered=(sequence >= 0) | beside.has("Fwd thread id"),
            shaped=dims[1] > 0,
        )
        texts = tuple(self._names.texts)
        convolves = np.array([_CONVOLUTION in text for text in texts], np.bool_)[code]
        self.numbering.add(counted.tolist())
        kinds = slice_kinds(code, texts, marks)
        self.columns.append(
            (
                kinds,
                code.astype(np.int32),
                sequence,
                correlation,
                np.where((stream >= 0) & (stream < 2**31), stream, -1).astype(np.int32),
                np.where(kinds == Kind.COPY, beside.numbers("bytes"), -1),
                self._shapes(data.raw, beside, dims, types, convolves),
            )
        )

    def _shapes(
        self, raw: bytes, beside: DebugAnnotations, dims: _Spans, types: _Spans, convolves: Bool
    ) -> Int32:
        """Code of each event's shapes; of a convolution, with the values of its inputs."""
        known = self._known
        codes = np.zeros(len(convolves), np.int32)
        shaped = true_at((dims[1] > 0) | (types[1] > 0))
        spans = [each[shaped].tolist() for each in (*dims, *types)]
        for row, start, end, t_start, t_end in zip(shaped.tolist(), *spans, strict=True):
            key = raw[start:end] if end else None, raw[t_start:t_end] if t_end else None
            try:
                codes[row] = known[key]
            except KeyError:
                codes[row] = self._new_shapes(key)
        if convolves.any():
            # What a convolution does depends on its stride and the like, not on shapes alone.
            starts, ends = beside.spans("Concrete Inputs")
            for row in true_at(convolves).tolist():
                pairs = (dims, types, (starts, ends))
                wide = tuple(raw[s[row] : e[row]] if e[row] else None for s, e in pairs)
                code = known.get(wide)
                codes[row] = self._new_shapes(wide) if code is None else code
        return codes

    def _new_shapes(self, key: tuple[bytes | None, ...]) -> int:
        text = b"".join(json_text(piece) for piece in key if piece is not None)
        code = self.signatures.setdefault(text, len(self.signatures))
        self._known[key] = code
        if len(self._known) > self._limits.distinct:
            raise refuse_distinct(self._source, self._limits.distinct, "input shapes")
        return code


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
    order = track.argsort(kind="stable")
    same = track[order][1:] == track[order][:-1]
    if (same & (np.diff(time[order]) < 0)).any():
        ends = _in_blocks(track, time, begins)
        if ends is not None:
            return ends
    return _by_time(track, time, begins)


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
