"""Text that some profilers write and no JSON parser takes, made readable; the rest is counted.

Kineto copies names into its file byte by byte: a name can bring invalid UTF-8
(pytorch/pytorch#64345), control characters (pytorch/pytorch#136180), quotes
(pytorch/kineto#1459) or the backslashes of a Windows path (pytorch/kineto#336) with it; numbers
can be ``nan`` or ``inf`` (pytorch/kineto#105); and programs that write a trace anew leave
halves of surrogate pairs and trailing commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from recompute_scan.trace.columns import Limits, refuse_depth
from recompute_scan.trace.health import count
from recompute_scan.trace.kineto.schema import (
    BETWEEN_EVENTS,
    STRING,
    UNREADABLE,
    Decode,
    Event,
    EventSpans,
    decode_events,
    measure_nesting,
)

T = TypeVar("T")

# A JSON string may hold none of these, and between values a space means the same.
_CONTROLS = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
# A valid pair, half of one, or any other escape: reading them in turn keeps `\\ud800` (an
# escaped backslash and plain text) apart from `\ud800`.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|\\.",
    re.DOTALL,
)
# Outside strings: words where a number should be, and numbers beyond any float.
_NOT_FINITE = re.compile(
    STRING + rb"|((?<![\w.])[-+]?(?:nan|inf(?:inity)?|n/a|none|undefined)\b(?:\([a-z]*\))?"
    rb"|-?\b1\.#(?:INF|IND|QNAN|SNAN)\w*"
    rb"|(?<![\w.])-?\d+(?:\.\d+)?e\+?\d{3,})",
    re.DOTALL | re.IGNORECASE,
)
_EXTRA_COMMA = re.compile(STRING + rb"|,(?=\s*[,}\]])", re.DOTALL)
# Whether there may be such a thing at all; cheap, and blind to strings.
_MAYBE_NOT_FINITE = re.compile(
    rb"[:\[,]\s*[-+]?(?:[nN][aA/oO]|[iI][nN]|[uU][nN]|1\.#|\d[\d.]*[eE]\+?\d{3})"
)
_MAYBE_EXTRA_COMMA = re.compile(rb",\s*[,}\]]")
_STRING_START = re.compile(rb'"[\w #.()/-]{1,60}"\s*:\s*"')
# A quote that can only end a value: the next key follows, or the object's end. The keys of the
# format itself first: source text in a name has keys of its own.
_KNOWN_END = re.compile(
    rb'"(?=\s*(?:\}\s*(?:\}\s*)?\Z'
    rb'|,\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args|bp|s|tts|cname|sf)"\s*:))'
)
_ANY_END = re.compile(rb'"(?=\s*(?:\}|,\s*"[\w #.()/-]{1,60}"\s*:))')
_LOOSE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|(["\\])')
# The same in a value with a backslash that starts no escape: a Windows path, all of it raw.
_RAW = re.compile(rb'\\["\\]|(["\\])')
_NO_ESCAPE = re.compile(rb'(?<!\\)(?:\\\\)*\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ARGS = re.compile(rb',\s*"args"\s*:')
# Longer pieces are no event of any profiler; repairing them would cost more than they hold.
_LONGEST = 1 << 20
# A block that was never written: nobody knows how many events it held.
_HOLE = b"\0" * 16


def mend_text(data: bytes) -> bytes:
    """The document in valid UTF-8, without raw control characters or halves of surrogate pairs.

    Bytes that are no UTF-8 and halves of pairs become U+FFFD, control characters spaces. Sound
    text stays as it is.
    """
    data = data.decode(errors="replace").encode().translate(_CONTROLS)
    if b"\\u" not in data:
        return data
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], data)


def mend(
    data: bytes,
    decode: Callable[[bytes], T],
    errors: tuple[type[Exception], ...],
    *,
    whole: bool = False,
) -> tuple[T, str] | None:
    """What one damaged object decodes to once repaired, and the counter for the repair.

    Repairs are tried from the mildest on: text, values and commas, quotes and backslashes, and
    last the object without its ``args``.

    Args:
        data: The object's bytes.
        decode: Decodes an object.
        errors: What ``decode`` raises on bytes it cannot take.
        whole: Whether to stop short of dropping the ``args``.

    Returns:
        ``None`` where nothing helped, ``data`` is longer than 1 MB, or has a hole.
    """
    if len(data) > _LONGEST or _HOLE in data:
        return None
    tried = data
    for attempt, counter in _attempts(data, whole):
        if attempt == tried:
            continue
        tried = attempt
        try:
            return decode(attempt), counter
        except errors:
            continue
    return None


def _attempts(data: bytes, whole: bool) -> Iterator[tuple[bytes, str]]:
    text = mend_text(data)
    yield text, "text_repaired"
    yield _mend_values(text), "events_repaired"
    before = text
    for end in (_KNOWN_END, _ANY_END):
        quoted = _mend_quotes(text, end)
        if quoted != before:
            before = quoted
            yield _mend_values(quoted), "events_repaired"
    args = None if whole else _ARGS.search(text)
    if args and not BETWEEN_EVENTS.search(text, args.end()):
        yield _mend_values(_mend_quotes(text[: args.start()] + b"}", _KNOWN_END)), "args_dropped"


def _mend_values(text: bytes) -> bytes:
    """Values that are no JSON become null; commas before a closing bracket go."""
    if _MAYBE_NOT_FINITE.search(text):
        text = _NOT_FINITE.sub(lambda found: b"null" if found[1] else found[0], text)
    if _MAYBE_EXTRA_COMMA.search(text):
        text = _EXTRA_COMMA.sub(lambda found: b"" if found[0] == b"," else found[0], text)
    return text


def _mend_quotes(text: bytes, end: re.Pattern[bytes]) -> bytes:
    """Quotes and backslashes inside values escaped; where a value ends is judged by ``end``."""
    pieces: list[bytes] = []
    position = 0
    while start := _STRING_START.search(text, position):
        stop = end.search(text, start.end())
        if stop is None:
            break
        inside = text[start.end() : stop.start()]
        if b'"' in inside or b"\\" in inside:
            kept = _RAW if _NO_ESCAPE.search(inside) else _LOOSE
            inside = kept.sub(_escape, inside)
        pieces += text[position : start.end()], inside
        position = stop.start()
        # The quote that ends this value begins no key.
        pieces.append(text[position : position + 1])
        position += 1
    return b"".join(pieces) + text[position:]


def _escape(found: re.Match[bytes]) -> bytes:
    return b"\\" + found[1] if found[1] else found[0]


_FOLLOWING = re.compile(rb"[^\s,]")
# After so many pieces in a row that nothing repaired, one in so many is still tried.
_HOPELESS = 200
_SAMPLE = 50


class Mender:
    """Takes damaged runs of events apart; whatever is lost or repaired is counted.

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
            if measure_nesting(piece, depth + 1) > depth:
                raise refuse_depth(self._source, depth) from None
        except UNREADABLE:
            pass
        return None

    def mended(self, piece: bytes) -> list[Event]:
        """The events of a piece that is not one sound event, repaired where they need it."""
        if event := self._mend(piece, whole=True):
            return [event]
        events: list[Event] = []
        within = EventSpans(piece)
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
        self, within: EventSpans, start: int, *, cut: bool = False
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
