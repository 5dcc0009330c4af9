"""Events out of bytes that do not decode: sound ones found, broken ones repaired or counted."""

from __future__ import annotations

import re
from itertools import islice

import msgspec

from recompute_scan.trace.health import count
from recompute_scan.trace.limits import Limits, refuse_depth
from recompute_scan.trace.repair import BETWEEN_EVENTS, mend, nesting, object_end
from recompute_scan.trace.schema import UNREADABLE, Decode, Event, decode_events

_NEXT = re.compile(rb"\s*,[\s,]*(?=\S)")
_MAY_END = re.compile(rb"\}(?=\s*(?:,\s*)*(?:[\]{]|\Z))")
# How many ends of a broken event are tried.
_ENDS = 8
# After so many pieces in a row that nothing repaired, one in so many is still tried.
_HOPELESS = 200
_SAMPLE = 50
# A longer event is none.
_LONGEST = 1 << 20
_WINDOW, _WINDOW_GROWS = 256, 16


class Mender:
    """Takes damaged stretches of events apart; whatever is lost or repaired is counted.

    Args:
        source: The file's name, for messages.
        limits: Bounds the nesting.
        health: Counters to add to.

    Attributes:
        decode: Decodes an array of events.
    """

    def __init__(self, source: str, limits: Limits, health: dict[str, int]) -> None:
        self.decode: Decode = decode_events
        self._source = source
        self._limits = limits
        self._health = health
        # Pieces in a row that nothing could repair.
        self._hopeless = 0

    def decoded(self, piece: bytes) -> Event | None:
        """The one event that the bytes are, or nothing.

        Raises:
            InputError: They are nested too deep (``E312``).
        """
        try:
            return self._decode_one(piece)
        except RecursionError:
            depth = self._limits.depth
            if nesting(piece, depth + 1) > depth:
                raise refuse_depth(self._source, depth) from None
        except UNREADABLE:
            pass
        return None

    def mended(self, piece: bytes) -> list[Event]:
        """The events of a piece that is not one sound event, repaired where they need it."""
        if event := self._mend(piece, whole=True):
            return [event]
        events: list[Event] = []
        position = 0
        while position < len(piece):
            found = self.event_at(piece, position)
            if not found:
                self._drop(piece)
                break
            events += found[0]
            position = self.next(piece, found[1])
        return events

    def event_at(
        self, data: bytes, start: int, *, cut: bool = False
    ) -> tuple[list[Event], int] | None:
        """The event that begins at ``start``, repaired if need be, and where it ends.

        What cannot be repaired is left out; either is counted.

        Args:
            data: Events.
            start: Where to begin.
            cut: Whether ``data`` may end inside an event, where a brace alone proves no end.

        Returns:
            ``None`` where no event ends.
        """
        if not data.startswith(b"{", start):
            brace = data.find(b"{", start)
            count(self._health, "events_dropped")
            return [], brace if brace >= 0 else len(data)
        end = _end(data, start)
        if end > 0 and (event := self.decoded(data[start:end])):
            return [event], end
        ends = [found.end() for found in islice(_MAY_END.finditer(data, start), _ENDS)]
        for end in ends:
            if event := self._mend(data[start:end], whole=cut and end == len(data)):
                return [event], end
        if not ends or (cut and ends[0] == len(data)):
            return None
        self._drop(b"")
        return [], ends[0]

    def next(self, data: bytes, end: int) -> int:
        """Where the event after the one that ends at ``end`` begins, if there is one."""
        following = _NEXT.match(data, end)
        if not following:
            return end if data.startswith(b"{", end) else len(data)
        count(self._health, "commas_dropped", following[0].count(b",") - 1)
        return following.end()

    def _mend(self, piece: bytes, whole: bool) -> Event | None:
        # What inflates behind damage is garbage without end: there only samples are tried.
        if self._hopeless > _HOPELESS and self._hopeless % _SAMPLE:
            return None
        mended = mend(piece, self._decode_one, UNREADABLE, whole=whole)
        if not mended:
            return None
        count(self._health, mended[1])
        self._hopeless = 0
        return mended[0]

    def _drop(self, piece: bytes) -> None:
        self._hopeless += 1
        count(self._health, "events_dropped", 1 + len(BETWEEN_EVENTS.findall(piece)))

    def _decode_one(self, piece: bytes) -> Event:
        events = self.decode(b"[" + piece + b"]")
        if len(events) != 1:
            raise msgspec.DecodeError("not one event")
        return events[0]


def _end(data: bytes, start: int) -> int:
    """Where the object ends, before another event seems to begin; -1 where it does not."""
    # Through a window that grows: nothing far behind is looked at for the sake of a short event.
    window = _WINDOW
    while True:
        border = BETWEEN_EVENTS.search(data, start, start + window)
        end = object_end(data, start, border.start() + 1 - start if border else window)
        if end > 0 or border or window >= _LONGEST or start + window >= len(data):
            return end
        window *= _WINDOW_GROWS
