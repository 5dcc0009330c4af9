"""Where events begin and end in a Kineto file.

How a file is laid out: where its events begin, what is between two of them, and chunks of
whole events.

What a file says about itself before and behind its events, and how it ends.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from recompute_scan.trace.health import count
from recompute_scan.trace.kineto.decode import Window
from recompute_scan.trace.kineto.repair import Mender, mend
from recompute_scan.trace.kineto.schema import (
    BETWEEN_EVENTS,
    UNREADABLE,
    Decode,
    Document,
    Event,
    EventSpans,
    decode_document,
    object_end,
)

EVENTS_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[[\s,]*(?=\{)')
_ARRAY_BEGIN = re.compile(rb"\s*\[[\s,]*(?=\{)")
_ARRAY = re.compile(rb"\s*\[")
_GAP = re.compile(rb"\s*,\s*\{\s*\"(?:\w+\"\s*:\s*)?")
# A first event that does not end within this is broken, and tells nothing of the layout.
_FIRST_EVENT = 1 << 20
BOM = b"\xef\xbb\xbf"


class Head(Struct, frozen=True):
    """What is before the first event.

    Attributes:
        text: The bytes up to and with the bracket that opens the events.
        first: Where the first event begins in the window.
        bare: Whether the file is a bare array of events.
        commas: Commas before the first event.
    """

    text: bytes
    first: int
    bare: bool
    commas: int


def find_head(window: Window) -> Head | None:
    """The file's head; ``None`` where it has no first event. The window may grow.

    Raises:
        InputError: Nothing like an event within the longest event allowed (``E315``).
    """
    searched = window.FIRST
    while True:
        data, end = window.data, window.end
        if _ARRAY.match(data, window.FIRST, end):
            found = _ARRAY_BEGIN.match(data, window.FIRST, end)
        else:
            found = EVENTS_BEGIN.search(data, searched, end)
        if found:
            text = bytes(data[window.FIRST : found.end()])
            opening = text.rindex(b"[")
            return Head(
                text=text[: opening + 1],
                first=found.end(),
                bare=found.re is _ARRAY_BEGIN,
                commas=text.count(b",", opening),
            )
        if window.ended or not _may_be_trace(data, window.FIRST, end):
            return None
        # The key may stand across the border; whitespace behind it is short in any file.
        searched = max(window.FIRST, end - 4096)
        window.grow()


def _may_be_trace(data: bytearray, start: int, end: int) -> bool:
    """Whether the text can still turn into a trace: it opens an object, or an array of them."""
    opening = bytes(data[start : start + 4096]).lstrip()[:64].replace(b" ", b"")
    if opening.startswith(b"["):
        rest = opening[1:].lstrip(b" \t\r\n,")
        return not rest or rest.startswith(b"{")
    return opening.startswith(b"{") or (not opening and end - start < 1 << 20)


class Separator(Struct, frozen=True):
    """What is between two events: ``text``, from the first one's end into the second.

    Attributes:
        text: The bytes looked for; they cannot be inside a sound string.
        comma: Where the comma is in ``text``.
        brace: Where the next event's brace is in ``text``.
        short: The part of ``text`` that all events share, whatever their first key.
        python: Bytes that each ``python_function`` event of this file has once.
    """

    text: bytes
    comma: int
    brace: int
    short: bytes
    python: bytes


def find_separator(window: Window) -> Separator:
    """The file's separator, read off what follows its first event. The window may grow.

    ``window`` begins at the first event. The text is the whitespace before the event's closing
    brace (where it is on a line of its own), the gap, and how the next event opens: with a
    line break in it, or a bare quote, it cannot be part of a sound string.
    """
    while True:
        end = object_end(bytes(memoryview(window.data)[: window.end]), window.FIRST, _FIRST_EVENT)
        known = end >= 0 and window.end - end > 256
        if known or window.ended or window.end > _FIRST_EVENT:
            break
        window.grow()
    gap = _GAP.match(window.data, end, window.end) if end >= 0 else None
    if gap is None:
        return _usual(bytes(window.data[window.FIRST : window.FIRST + 256]))
    before = bytes(window.data[max(window.FIRST, end - 64) : end - 1])
    indent = before[len(before.rstrip(b" \t")) :]
    own_line = before[: len(before) - len(indent)].endswith(b"\n")
    lead = b"\n" + indent if own_line else b""
    text = gap[0]
    if b"\n" in text:
        # Every key may come first: a line break is proof enough.
        text = text[: text.index(b'"') + 1]
    colon = b'": "' if b'": ' in window.data[window.FIRST : end] else b'":"'
    return _separator(lead + b"}" + text, colon)


def _usual(first: bytes) -> Separator:
    """The separator of Kineto's own files, or of a compact one, where the first event is broken."""
    if b"\n" in first:
        return _separator(b'\n  },\n  {\n    "', b'": "')
    if first.startswith(b'{"ph": '):
        return _separator(b'}, {"ph": ', b'": "')
    return _separator(b'},{"ph":', b'":"')


def _separator(text: bytes, colon: bytes) -> Separator:
    return Separator(
        text=text,
        comma=text.index(b","),
        brace=text.index(b"{"),
        short=text[: text.index(b'"') + 1],
        python=b'"cat' + colon + b'python_function"',
    )


def loose_cut(data: bytearray, start: int, end: int) -> tuple[int, int] | None:
    """The last place that looks like a separator: its comma and the next event's brace."""
    last = None
    # Only the second half: the window is about to grow, and the first has been looked at.
    for found in BETWEEN_EVENTS.finditer(data, start + (end - start) // 2, end):
        last = found
    if last is None:
        return None
    return data.index(b",", last.start()), data.index(b"{", last.start())


# Bytes to decode at once; larger ones cost more in page faults.
CHUNK = 256 * 1024
_LOOKED_AT = 256


def decode_chunk(data: bytearray, first: int, comma: int, decode: Decode) -> list[Event]:
    """The events from ``first`` to the comma that follows them, decoded as an array.

    The byte before ``first`` and the comma are an array's brackets meanwhile. They decode only
    if both places are between two events.

    Raises:
        UNREADABLE: They do not decode.
    """
    before = data[first - 1], data[comma]
    data[first - 1], data[comma] = b"[]"
    try:
        with memoryview(data) as view:
            return decode(view[first - 1 : comma + 1])
    finally:
        data[first - 1], data[comma] = before


def python_frames(data: bytearray, first: int, comma: int, separator: Separator) -> int:
    """How many events the chunk has if all are Python frames, else 0.

    It must have twice as many opening braces as frames: a frame and its args take one each, and
    an event that opens unlike its neighbours, which the count of separators misses, would add one.
    """
    if data.find(separator.python, first, first + _LOOKED_AT) < 0:
        return 0
    frames = data.count(separator.python, first, comma)
    if data.count(separator.short, first, comma) != frames - 1:
        return 0
    braces = np.frombuffer(data, np.uint8, comma - first, first) == ord("{")  # a fifth of `count`
    return frames if int(np.count_nonzero(braces)) == 2 * frames else 0


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
