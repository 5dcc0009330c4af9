"""Events out of bytes that do not decode: sound ones found, broken ones repaired or counted."""

from __future__ import annotations

import re

import msgspec

from recompute_scan.trace.brackets import BETWEEN_EVENTS, Events, nesting
from recompute_scan.trace.health import count
from recompute_scan.trace.limits import Limits, refuse_depth
from recompute_scan.trace.repair import mend
from recompute_scan.trace.schema import UNREADABLE, Decode, Event, decode_events

_FOLLOWING = re.compile(rb"[^\s,]")
# After so many pieces in a row that nothing repaired, one in so many is still tried.
_HOPELESS = 200
_SAMPLE = 50


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
        within = Events(piece)
        position = 0
        while position < len(piece):
            found = self.event_at(within, position)
            if not found:
                self._drop(piece)
                break
            events += found[0]
            position = self.next(piece, found[1])
        return events

    def event_at(
        self, within: Events, start: int, *, cut: bool = False
    ) -> tuple[list[Event], int] | None:
        """The event that begins at ``start``, repaired if need be, and where it ends.

        What cannot be repaired is left out; either is counted.

        Args:
            within: Where the event lies.
            start: Where it begins there.
            cut: Whether the bytes may end inside an event, where a brace alone proves no end.

        Returns:
            ``None`` where no event ends.
        """
        data = within.data
        if not data.startswith(b"{", start):
            brace = data.find(b"{", start)
            count(self._health, "events_dropped")
            return [], brace if brace >= 0 else len(data)
        end = within.end(start)
        if end > 0 and (event := self.decoded(data[start:end])):
            return [event], end
        nearest = None
        for end in within.likely_ends(start):
            nearest = nearest or end
            if event := self._mend(data[start:end], whole=cut and end == len(data)):
                return [event], end
        if nearest is None or (cut and nearest == len(data)):
            return None
        self._drop(b"")
        return [], nearest

    def next(self, data: bytes, end: int) -> int:
        """Where something follows what ends at ``end``: the next event, as a rule."""
        following = _FOLLOWING.search(data, end)
        if not following:
            return len(data)
        commas = data.count(b",", end, following.start())
        count(self._health, "commas_dropped", max(0, commas - 1))
        return following.start()

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
