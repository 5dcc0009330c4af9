"""Kineto's Chrome-trace JSON, torch 1.8 to today, read as a stream.

The events are taken in chunks cut at the separator that the file itself uses. A chunk decodes
as an array only if it was cut between two events, so with the start of each proven by the chunk
before it no wrong cut passes silently; a chunk that does not decode goes event by event through
:mod:`recompute_scan.trace.kineto.repair`, and what cannot be repaired is left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from recompute_scan.trace.columns import Limits, Trace
from recompute_scan.trace.health import count
from recompute_scan.trace.kineto.chunks import (
    BOM,
    CHUNK,
    About,
    FileEnd,
    Separator,
    decode_chunk,
    find_head,
    find_separator,
    loose_cut,
    python_frames,
)
from recompute_scan.trace.kineto.decode import Builder, Packer, Window
from recompute_scan.trace.kineto.repair import Mender
from recompute_scan.trace.kineto.schema import (
    UNREADABLE,
    Decode,
    Event,
    Outline,
    decode_document,
    decode_document_exactly,
    decode_events,
    decode_events_exactly,
    earliest,
    is_coarse,
)
from recompute_scan.trace.sniff import nothing_kept, without_events
from recompute_scan.trace.streams import Stream

# A cut at a false separator makes pieces that only decode together.
_JOINED = 4
_FINISHED = -1


class Reader:
    """Reads one stream into a :class:`Builder`.

    Args:
        stream: The uncompressed bytes.
        source: The file's name, for messages.
        limits: What is refused.
        python: Whether ``python_function`` events are kept.
        health: Counters to add to.
        within: Only what overlaps this span of time is kept, ns.
        chunk: Bytes to decode at once; larger ones cost more in page faults.
    """

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
        self._ending = FileEnd(self._about, self._mender, health)
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
        about, cut = self._about, self._ending.cut
        trace = self._builder.finish(about.metadata, about.rank, cut)
        return replace(trace, outline=self._outline if self._within is None else None)

    def _read_head(self) -> Separator:
        """Take in what is before the events; what is between two of them."""
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
        self._ending.bare = head.bare
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
        """Whether the chunk holds nothing but Python frames that nobody asked for."""
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
            last_ones = self._ending.inside(window, piece, start - window.FIRST)
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
            if self._ending.bare:
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
            self._builder.add(self._ending.salvaged(self._window, rest))
        else:
            self._about.add(document)
            self._builder.add(document.traceEvents or ())


def _starts(chunk: bytes, separator: Separator, first: int) -> Iterator[int]:
    position = chunk.find(separator.text, first)
    while position >= 0:
        yield position + separator.brace
        position = chunk.find(separator.text, position + len(separator.text))
