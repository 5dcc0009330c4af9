"""Texts that a trace writes once and numbers (``interned_data``), and tracks, which it describes.

Numbers belong to one sequence of packets, and mean what was last written before they are used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Int64
from recompute_scan.trace.limits import Limits, refuse_distinct
from recompute_scan.trace.perfetto.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    Bytes,
    Fields,
    gather,
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
        self, data: Bytes, interned: Fields, sequence: Int64, first_packet: int, broken: list[int]
    ) -> None:
        """Take in the texts of some packets.

        Args:
            data: What holds them.
            interned: ``interned_data`` of packets, whose rows are ``message``.
            sequence: The sequence of each packet of this run.
            first_packet: Number of the run's first packet in the file.
            broken: See :func:`recompute_scan.trace.perfetto.wire.walk`.
        """
        for packet, start, end in zip(
            interned.message.tolist(), interned.start.tolist(), interned.end.tolist(), strict=True
        ):
            for space, entry in _fields(data.raw[start:end], broken):
                if space not in _TEXTS or isinstance(entry, int):
                    continue
                parts = dict(_fields(entry, broken))
                text, iid = parts.get(_TEXTS[space], b""), parts.get(_IID, 0)
                if isinstance(text, bytes) and isinstance(iid, int):
                    key = (space, int(sequence[packet]), iid)
                    meaning = (first_packet + packet, self.code(text))
                    self._meanings.setdefault(key, []).append(meaning)

    def resolve(self, space: int, sequence: Int64, iid: Int64, packet: Int64) -> Int64:
        """The code of each number; 0 where it stands for nothing."""
        sequences, which = np.unique(sequence, return_inverse=True)
        iids, number = np.unique(iid, return_inverse=True)
        pairs, pair = np.unique(which * max(1, len(iids)) + number, return_inverse=True)
        codes = np.zeros(len(pairs), np.int64)
        for place, both in enumerate(pairs.tolist()):
            key = (space, int(sequences[both // len(iids)]), int(iids[both % len(iids)]))
            meanings = self._meanings.get(key)
            if meanings is None:
                continue
            codes[place] = meanings[0][1]
            if len({code for _, code in meanings}) > 1:
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

    def describe(self, data: Bytes, descriptors: Fields, broken: list[int]) -> None:
        """Take in ``track_descriptor`` of some packets.

        Raises:
            InputError: More tracks than allowed (``E314``).
        """
        number = len(descriptors.message)
        fields = gather(data, descriptors.start, descriptors.end, broken)
        uuids = fields.numbers(_UUID, number)
        called = {}
        for kind in (_PROCESS, _THREAD):  # a track of both is a thread's
            inside = fields.pick(kind, LENGTH)
            parts = gather(data, inside.start, inside.end, broken)
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


def _fields(data: bytes, broken: list[int]) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one message: number and value, the bytes of what has a length."""
    try:
        at = 0
        while at < len(data):
            tag, at = number_at(data, at)
            value, after = number_at(data, at) if tag & 7 in (VARINT, LENGTH) else (0, at)
            if tag & 7 == LENGTH:
                at = after + value
                if at > len(data):
                    broken[0] += 1
                    return
                yield tag >> 3, data[after:at]
            elif tag & 7 == VARINT:
                at = after
                yield tag >> 3, value
            else:
                at += {FIXED64: 8, FIXED32: 4}[tag & 7]
    except (IndexError, KeyError, ValueError):
        broken[0] += 1
