"""What a file says about itself before and behind its events, and how it ends."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from recompute_scan.trace.health import count
from recompute_scan.trace.kineto.brackets import EventSpans, object_end
from recompute_scan.trace.kineto.layout import EVENTS_BEGIN
from recompute_scan.trace.kineto.repair import Mender, mend
from recompute_scan.trace.kineto.schema import UNREADABLE, Document, Event, decode_document
from recompute_scan.trace.kineto.window import Window


class About:
    """Collects what is said in any place of one file.

    Args:
        health: Counters to add to.
    """

    def __init__(self, health: dict[str, int]) -> None:
        self.metadata: dict[str, Any] = {}
        self._health = health

    def add(self, document: Document) -> None:
        """Take in the fields of a document; later ones go before earlier ones."""
        fields = msgspec.structs.asdict(document)
        del fields["traceEvents"]
        self.metadata |= {name: value for name, value in fields.items() if value is not None}

    def read(self, text: bytes) -> None:
        """Take in a document, repaired if need be; what cannot be read is counted."""
        try:
            self.add(decode_document(text))
        except UNREADABLE:
            mended = mend(text, decode_document, UNREADABLE)
            count(self._health, "metadata_repaired" if mended else "metadata_unreadable")
            if mended:
                self.add(mended[0])

    @property
    def rank(self) -> int | None:
        """The rank of the recorded process, if said."""
        info = self.metadata.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and 0 <= rank < 2**31 else None


# How much of what follows the events is looked at.
_TAIL = 4 << 20
_CLOSES = re.compile(rb"\s*(?:,\s*)*\]")
_CLOSED = re.compile(rb"\}\s*(?:,\s*)*\]")


class FileEnd:
    """Takes in what is behind the last sound chunk of events.

    Args:
        about: Takes what the file says about itself.
        mender: Takes events apart.
        health: Counters to add to.

    Attributes:
        bare: Whether the file is a bare array of events.
        cut: Whether the file was cut among its events.
    """

    def __init__(self, about: About, mender: Mender, health: dict[str, int]) -> None:
        self.bare = False
        self.cut = False
        self._about = about
        self._mender = mender
        self._health = health

    def inside(self, window: Window, piece: bytes, behind: int) -> list[Event] | None:
        """The last events of a trace that ends inside a piece, though the file goes on.

        Args:
            window: What is held of the file.
            piece: What seems to be one event.
            behind: How many bytes of the window are before it.

        Returns:
            ``None`` where the trace does not end here.
        """
        end = object_end(piece) if _CLOSED.search(piece) else -1
        closed = _CLOSES.match(piece, end) if end > 0 else None
        event = self._mender.decoded(piece[:end]) if closed else None
        if closed and event:
            self._read_tail(window, window.rest()[behind + closed.end() :])
            return [event]
        if EVENTS_BEGIN.search(piece):
            # The next trace begins where this one was cut.
            self.cut = True
            count(self._health, "cut_short")
            self._pass_over(window, window.rest()[behind:])
            return []
        return None

    def salvaged(self, window: Window, rest: bytes) -> list[Event]:
        """The last events one by one, to where the file is cut or its events end."""
        taken: list[Event] = []
        position = 0
        closed = None
        rest = rest.rstrip()
        within = EventSpans(rest)
        while position < len(rest) and (found := self._mender.event_at(within, position, cut=True)):
            taken += found[0]
            position = found[1]
            if closed := _CLOSES.match(rest, position):
                break
            position = self._mender.next(rest, position)
        if closed:
            count(self._health, "commas_dropped", closed[0].count(b","))
            self._read_tail(window, rest[closed.end() :])
            return taken
        left = rest[position:].strip(b" \t\r\n,")
        # An array of events needs no closing bracket: the format says so.
        if left or not self.bare:
            self.cut = True
            count(self._health, "cut_short")
        if EVENTS_BEGIN.search(left):
            self._pass_over(window, left)
        return taken

    def _read_tail(self, window: Window, after: bytes) -> None:
        """Read what the file says about itself behind its events."""
        after += window.behind(_TAIL)
        if self.bare:
            self._pass_over(window, after)
            return
        text = b'{"_":0' + after
        end = object_end(text, most=_TAIL)
        if end > 0:
            self._about.read(text[:end])
            self._pass_over(window, text[end:])
            return
        count(self._health, "cut_short")
        if after.strip():
            count(self._health, "metadata_unreadable")

    def _pass_over(self, window: Window, beyond: bytes) -> None:
        """Count what follows the trace's end."""
        beyond = beyond.strip()
        count(self._health, "bytes_after_end", len(beyond) + window.drain())
        if EVENTS_BEGIN.search(beyond):
            count(self._health, "documents_after_first")
