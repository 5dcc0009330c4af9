"""Kineto's Chrome-trace JSON, torch 1.8 to today, read as a stream.

The events are taken in chunks cut at the separator that the file itself uses. A chunk decodes
as an array only if it was cut between two events, so with the start of each proven by the chunk
before it no wrong cut passes silently. A chunk that does not decode goes event by event through
:class:`recompute_scan.trace.kineto.schema.Mender`, and events that cannot be repaired are left out
and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.trace.columns import Limits, Outline, Trace
from recompute_scan.trace.health import count
from recompute_scan.trace.kineto.decode import Builder, Packer, Window
from recompute_scan.trace.kineto.schema import (
    BETWEEN_EVENTS,
    LONGEST,
    UNREADABLE,
    Decode,
    Document,
    Event,
    EventSpans,
    Mender,
    decode_document,
    decode_document_exactly,
    decode_events,
    decode_events_exactly,
    earliest,
    is_coarse,
    mend,
    object_end,
)
from recompute_scan.trace.sniff import nothing_kept, without_events
from recompute_scan.trace.streams import Stream

EVENTS_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[[\s,]*(?=\{)')
_ARRAY_BEGIN = re.compile(rb"\s*\[[\s,]*(?=\{)")
_ARRAY = re.compile(rb"\s*\[")
_GAP = re.compile(rb"\s*,\s*\{\s*\"(?:\w+\"\s*:\s*)?")
BOM = b"\xef\xbb\xbf"


class Head(Struct, frozen=True):
    """The bytes before the first event.

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
    """The bytes between two events: ``text``, from the first one's end into the second.

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
    brace (where it is alone on a line), the gap, and how the next event opens: with a
    line break in it, or a bare quote, it cannot be part of a sound string.
    """
    while True:
        end = object_end(bytes(memoryview(window.data)[: window.end]), window.FIRST)
        known = end >= 0 and window.end - end > 256
        if known or window.ended or window.end > LONGEST:
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
    """Collects a file's metadata, in any place of it."""

    def __init__(self, health: dict[str, int]) -> None:
        self.metadata: dict[str, Any] = {}
        self._health = health

    def add(self, document: Document) -> None:
        """Take in the fields of a document; later ones go before earlier ones."""
        fields = msgspec.structs.asdict(document)
        del fields["traceEvents"]
        self.metadata |= {name: value for name, value in fields.items() if value is not None}

    def read(self, text: bytes) -> None:
        """Take in a document, repaired if need be; an unreadable one is counted."""
        try:
            self.add(decode_document(text))
        except UNREADABLE:
            mended = mend(text, decode_document)
            count(self._health, "metadata_repaired" if mended else "metadata_unreadable")
            if mended:
                self.add(mended[0])

    @property
    def rank(self) -> int | None:
        """The rank of the recorded process, if known."""
        info = self.metadata.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and 0 <= rank < 2**31 else None


# So many bytes behind the events are looked at.
_TAIL = 4 << 20
_CLOSES = re.compile(rb"\s*(?:,\s*)*\]")
_CLOSED = re.compile(rb"\}\s*(?:,\s*)*\]")


# A cut at a false separator makes pieces that only decode together.
_JOINED = 4
_FINISHED = -1


class Reader:
    """Reads one stream of uncompressed bytes; see :func:`recompute_scan.trace.sources.read`."""

    def __init__(
        self,
        stream: Stream,
        source: str,
        limits: Limits,
        python: bool,
        health: dict[str, int],
        within: tuple[int, int] | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self._source = source
        self._limits = limits
        self._python = python
        self._health = health
        self._window = Window(stream, chunk, source, limits)
        self._within = within
        self._packer = Packer(python, health, within)
        self._builder = Builder(source, limits, self._packer, health)
        self._decode: Decode = decode_events
        self._mender = Mender(source, limits, health)
        self._decode_document = decode_document
        self._about = About(health)
        # Is the file a bare array of events, and was it cut among them?
        self._bare = self._cut = False
        self._outline = Outline()
        # Where the last decoding stopped for want of bytes: it must not stop there twice.
        self._waiting = 0

    def read(self) -> Trace:
        """The trace.

        Raises:
            InputError: No JSON (``E302``), no trace (``E303``), no events (``E304``), or
                beyond a limit (``E312`` to ``E315``).
        """
        self._read_events(self._read_head())
        if not self._builder.rows:
            raise nothing_kept(self._source, self._health)
        if self._within is None:
            self._packer.numbering.report(self._health)
        trace = self._builder.finish(self._about.metadata, self._about.rank, self._cut)
        return replace(trace, outline=self._outline if self._within is None else None)

    def _read_head(self) -> Separator:
        """Take in the bytes before the events; returns what separates two of them."""
        window = self._window
        window.fill()
        if window.data.startswith(BOM, window.FIRST, window.end):
            count(self._health, "byte_order_mark")
            window.drop(window.FIRST + len(BOM))
        head = find_head(window)
        if head is None:
            raise without_events(
                self._source, window.rest(), window.ended, self._limits, self._health
            )
        count(self._health, "commas_dropped", head.commas)
        self._bare = head.bare
        if not head.bare:
            self._about.read(head.text + b"]}")
        window.drop(head.first)
        return find_separator(window)

    # The chunks

    def _read_events(self, separator: Separator) -> None:
        window = self._window
        while True:
            cut = self._find_cut(separator)
            if cut is None:
                if window.ended:
                    break
                window.grow()
                continue
            comma, brace = cut
            time = earliest(window.data, window.FIRST, comma)
            self._outline.add(window.position, time)
            if self._is_python(separator, comma) or self._is_later(separator, comma, time):
                window.drop(brace)
                continue
            undone = self._take(comma, separator)
            if undone == _FINISHED:
                return
            self._waiting = 0
            if undone:
                # Its end may have been a false one: again, with what follows.
                self._waiting = comma - undone + window.FIRST
                window.drop(undone)
            else:
                window.drop(brace)
        self._finish(window.rest())

    def _find_cut(self, separator: Separator) -> tuple[int, int] | None:
        """The last place between two events, beyond the one tried before."""
        window = self._window
        start = max(window.FIRST, self._waiting)
        found = window.data.rfind(separator.text, start, window.end)
        if found >= 0:
            return found + separator.comma, found + separator.brace
        if window.end - start >= CHUNK:
            return loose_cut(window.data, start, window.end)
        return None

    def _is_python(self, separator: Separator, comma: int) -> bool:
        """Whether the chunk holds nothing but Python frames that are not wanted."""
        if self._python:
            return False
        data, first = self._window.data, self._window.FIRST
        frames = python_frames(data, first, comma, separator)
        if not frames:
            return False
        self._packer.pass_over(frames)
        return True

    def _is_later(self, separator: Separator, comma: int, time: float) -> bool:
        """Whether the chunk begins and ends behind the span of time that is wanted."""
        if self._within is None or time < self._within[1]:
            return False
        data, first = self._window.data, self._window.FIRST
        self._packer.left_out += data.count(separator.text, first, comma) + 1
        return True

    def _take(self, comma: int, separator: Separator) -> int:
        """Decode the chunk up to the comma into columns.

        Returns:
            0; or where the part begins that needs what follows it; or ``_FINISHED``.
        """
        data, first = self._window.data, self._window.FIRST
        try:
            events = decode_chunk(data, first, comma, self._decode)
            if self._needs_text(events):
                events = decode_chunk(data, first, comma, self._decode)
        except UNREADABLE:
            return self._repair(comma, separator)
        self._builder.add(events)
        return 0

    def _needs_text(self, events: Sequence[Event]) -> bool:
        """Whether the events must be decoded again, now with the text of every time."""
        if self._packer.exact or not any(
            is_coarse(event.ts) for event in (*events[:1], *events[-1:])
        ):
            return False
        self._decode, self._decode_document = decode_events_exactly, decode_document_exactly
        self._mender.decode = self._decode
        self._packer.exact = True
        return True

    # Damage

    def _repair(self, comma: int, separator: Separator) -> int:
        """Take the chunk event by event; see :meth:`_take`."""
        window = self._window
        chunk = bytes(memoryview(window.data)[:comma])
        starts = [window.FIRST, *_starts(chunk, separator, window.FIRST)]
        ends = [*(start - separator.brace + separator.comma for start in starts[1:]), comma]
        taken: list[Event] = []
        position = 0
        undone = 0
        # A line break in the separator cannot be in a string, nor the indentation deeper down.
        joined = 1 if separator.text.startswith(b"\n") else _JOINED
        while position < len(starts) and not undone:
            start = starts[position]
            event = None
            for last in range(position, min(len(starts), position + joined)):
                event = self._mender.decoded(chunk[start : ends[last]])
                if event:
                    break
            if event:
                taken.append(event)
                position = last + 1
                continue
            piece = chunk[start : ends[position]]
            last_ones = self._end_inside(piece, start - window.FIRST)
            if last_ones is not None:
                taken += last_ones
                undone = _FINISHED
            elif position == len(starts) - 1 and not self._waiting:
                undone = start
            else:
                taken += self._mender.mended(piece)
            position += 1
        self._builder.add(taken)
        return undone

    def _finish(self, rest: bytes) -> None:
        """Take in the last event and what is behind the events."""
        try:
            if self._bare:
                events = self._decode(b"[" + rest)
                if self._needs_text(events):
                    events = self._decode(b"[" + rest)
                self._builder.add(events)
                return
            text = b'{"traceEvents":[' + rest
            document = self._decode_document(text)
            if self._needs_text(document.traceEvents or ()):
                document = self._decode_document(text)
        except UNREADABLE:
            self._builder.add(self._salvaged(rest))
        else:
            self._about.add(document)
            self._builder.add(document.traceEvents or ())

    def _end_inside(self, piece: bytes, behind: int) -> list[Event] | None:
        """The last events of a trace that ends inside a piece, though the file goes on.

        ``behind`` bytes of the window are before the piece, which seems to be one event.

        Returns:
            ``None`` where the trace does not end here.
        """
        end = object_end(piece) if _CLOSED.search(piece) else -1
        closed = _CLOSES.match(piece, end) if end > 0 else None
        event = self._mender.decoded(piece[:end]) if closed else None
        if closed and event:
            self._read_tail(self._window.rest()[behind + closed.end() :])
            return [event]
        if EVENTS_BEGIN.search(piece):
            # The next trace begins where this one was cut.
            self._cut = True
            count(self._health, "cut_short")
            self._pass_over(self._window.rest()[behind:])
            return []
        return None

    def _salvaged(self, rest: bytes) -> list[Event]:
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
            self._read_tail(rest[closed.end() :])
            return taken
        left = rest[position:].strip(b" \t\r\n,")
        # An array of events needs no closing bracket: the format says so.
        if left or not self._bare:
            self._cut = True
            count(self._health, "cut_short")
        if EVENTS_BEGIN.search(left):
            self._pass_over(left)
        return taken

    def _read_tail(self, after: bytes) -> None:
        """Read what the file says about itself behind its events."""
        after += self._window.behind(_TAIL)
        if self._bare:
            self._pass_over(after)
            return
        text = b'{"_":0' + after
        end = object_end(text, most=_TAIL)
        if end > 0:
            self._about.read(text[:end])
            self._pass_over(text[end:])
            return
        count(self._health, "cut_short")
        if after.strip():
            count(self._health, "metadata_unreadable")

    def _pass_over(self, beyond: bytes) -> None:
        """Count what follows the trace's end."""
        beyond = beyond.strip()
        count(self._health, "bytes_after_end", len(beyond) + self._window.drain())
        if EVENTS_BEGIN.search(beyond):
            count(self._health, "documents_after_first")


def _starts(chunk: bytes, separator: Separator, first: int) -> Iterator[int]:
    position = chunk.find(separator.text, first)
    while position >= 0:
        yield position + separator.brace
        position = chunk.find(separator.text, position + len(separator.text))
