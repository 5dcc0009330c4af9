"""Texts that a trace writes once and numbers (``interned_data``), and tracks, which it describes.

Numbers belong to one sequence of packets, and mean what was last written before they are used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from recompute_scan.arrays import ranked, true_at
from recompute_scan.trace.columns import Int64
from recompute_scan.trace.limits import Limits, refuse_distinct
from recompute_scan.trace.perfetto.messages import gather
from recompute_scan.trace.perfetto.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    Bytes,
    Spans,
    number_at,
)

# Field numbers in InternedData, and where the text is in the message that they hold.
EVENT_NAME, GPU_SPECIFICATION, COMPUTE_KERNEL = 2, 24, 1000
_TEXTS = {EVENT_NAME: 2, GPU_SPECIFICATION: 2, COMPUTE_KERNEL: 3}
_IID = 1
# In TrackDescriptor: its number, a process, a thread; in those: pid, tid.
_UUID, _PROCESS, _THREAD = 1, 3, 4
_PID, _TID = 1, 2
NOWHERE = ("-1", "-1")


class InternedNames:
    """Distinct texts, numbered as they come, and what the file's own numbers stand for.

    Args:
        source: The file's name, for messages.
        limits: Bounds on distinct texts.

    Attributes:
        texts: Code of each text; the first is empty.
        undecodable: How many were no UTF-8.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        self.texts: dict[str, int] = {"": 0}
        self.undecodable = 0
        self._source = source
        self._limits = limits
        self._meanings: dict[tuple[int, int, int], list[tuple[int, int]]] = {}

    def code(self, text: bytes) -> int:
        """Code of a text.

        Raises:
            InputError: More distinct ones than allowed (``E314``).
        """
        try:
            decoded = text.decode()
        except UnicodeDecodeError:
            self.undecodable += 1
            decoded = text.decode(errors="replace")
        found = self.texts.setdefault(decoded, len(self.texts))
        if found > self._limits.distinct:
            raise refuse_distinct(self._source, self._limits.distinct, "names")
        return found

    def define(
        self, data: Bytes, interned: Spans, sequence: Int64, first_packet: int, broken: list[int]
    ) -> None:
        """Take in the texts of some packets.

        Args:
            data: What holds them.
            interned: ``interned_data`` of packets, whose rows are ``message``.
            sequence: The sequence of each packet of this run.
            first_packet: Number of the run's first packet in the file.
            broken: See :func:`recompute_scan.trace.perfetto.wire.walk`.
        """
        entries: list[tuple[int, int, int, int]] = []
        for packet, start, end in interned.each():
            for space, first, last in _pieces(data.raw, start, end, broken):
                if space in _TEXTS:
                    entries.append((packet, space, first, last))
        if not entries:
            return
        _, _, begin, stop = np.array(entries, np.int64).T
        fields = gather(data, Spans(begin, begin, stop), broken)
        iids = fields.numbers(_IID, len(entries)).tolist()
        texts = [b""] * len(entries)
        for number in set(_TEXTS.values()):
            for entry, start, end in fields.pick(number).each():
                if _TEXTS[entries[entry][1]] == number:
                    texts[entry] = data.raw[start:end]
        for (packet, space, _, _), iid, text in zip(entries, iids, texts, strict=True):
            key = (space, int(sequence[packet]), iid)
            meaning = (first_packet + packet, self.code(text))
            self._meanings.setdefault(key, []).append(meaning)

    def resolve(self, space: int, sequence: Int64, iid: Int64, packet: Int64) -> Int64:
        """The code of each number; 0 where it stands for nothing."""
        sequences, which = ranked(sequence)
        iids, number = ranked(iid)
        width = max(1, len(iids))
        pairs, pair = ranked(which * width + number)
        codes = np.zeros(len(pairs), np.int64)
        of, called = sequences[pairs // width].tolist(), iids[pairs % width].tolist()
        for place, (which_one, its) in enumerate(zip(of, called, strict=True)):
            meanings = self._meanings.get((space, which_one, its))
            if meanings is None:
                continue
            codes[place] = meanings[0][1]
            if len(meanings) > 1 and len({code for _, code in meanings}) > 1:
                codes[place] = -1 - place
        found: Int64 = codes[pair]
        for row in true_at(found < 0).tolist():
            key = (space, int(sequence[row]), int(iid[row]))
            meanings = self._meanings[key]
            last = bisect_right(meanings, (int(packet[row]), len(self.texts)))
            found[row] = meanings[last - 1][1] if last else 0
        return found


class Tracks:
    """What tracks are called: process and thread of each."""

    def __init__(self, source: str, limits: Limits) -> None:
        self._called: dict[int, tuple[str, str]] = {}
        self._source = source
        self._limits = limits

    def describe(self, data: Bytes, descriptors: Spans, broken: list[int]) -> None:
        """Take in ``track_descriptor`` of some packets.

        Raises:
            InputError: More tracks than allowed (``E314``).
        """
        number = len(descriptors.message)
        fields = gather(data, descriptors, broken)
        uuids = fields.numbers(_UUID, number)
        called = {}
        for kind in (_PROCESS, _THREAD):  # a track of both is a thread's
            inside = fields.pick(kind)
            parts = gather(data, inside, broken)
            pids = parts.numbers(_PID, len(inside.message))
            tids = parts.numbers(_TID, len(inside.message))
            for row, pid, tid in zip(
                inside.message.tolist(), _signed(pids), _signed(tids), strict=True
            ):
                called[int(uuids[row])] = (str(pid), str(tid if kind == _THREAD else 0))
        self._called |= called
        if len(self._called) > self._limits.distinct:
            raise refuse_distinct(self._source, self._limits.distinct, "threads")

    def called(self, uuid: int) -> tuple[str, str]:
        """Process and thread; :data:`NOWHERE` for a track that nothing describes."""
        return self._called.get(uuid, NOWHERE)


def _signed(numbers: Int64) -> list[int]:
    """Numbers of 32 bits, which are written with 64."""
    found: list[int] = numbers.astype(np.int32).tolist()
    return found


def _pieces(data: bytes, at: int, end: int, broken: list[int]) -> Iterator[tuple[int, int, int]]:
    """The fields of one message that have a length: number, where the bytes begin and end."""
    try:
        while at < end:
            tag, at = (data[at], at + 1) if data[at] < 128 else number_at(data, at)
            wire = tag & 7
            if wire == LENGTH:
                size, at = (data[at], at + 1) if data[at] < 128 else number_at(data, at)
                start, at = at, at + size
                if at > end:
                    broken[0] += 1
                    return
                yield tag >> 3, start, at
            elif wire == VARINT:
                _, at = number_at(data, at)
            else:
                at += {FIXED64: 8, FIXED32: 4}[wire]
    except (IndexError, KeyError, ValueError):
        broken[0] += 1
