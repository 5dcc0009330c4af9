"""Kineto's events: their fields, and the repair of text that no JSON parser takes.

Of an event the fields in use are decoded, and nothing else. Times become exact nanoseconds, and
kinds cover all spellings of a category since torch 1.8. The field names of each version come from
Kineto's writer (``libkineto/src/output_json.cpp``) and from traces. Every field may hold anything:
leniency costs no time, and one odd value must not cost its neighbors.

Kineto copies names into its file byte by byte: a name can bring invalid UTF-8
(pytorch/pytorch#64345), control characters (pytorch/pytorch#136180), quotes
(pytorch/kineto#1459) or the backslashes of a Windows path (pytorch/kineto#336) with it; numbers
can be ``nan`` or ``inf`` (pytorch/kineto#105); and programs that write a trace anew leave
halves of surrogate pairs and trailing commas. Lost and repaired events are counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any, TypeVar

import msgspec

from recompute_scan.trace.columns import Kind, Limits, refuse
from recompute_scan.trace.health import count

T = TypeVar("T")

# Matches at every quote, closed or not: a failing match would be tried again at each quote.
STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
# A place that looks like the border of two events, whatever the file's layout.
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{\s*\"(?:ph|cat|name|pid|tid|ts|args|s|id)\"\s*:")
_TOKEN = re.compile(STRING + rb"|[{}\[\]]", re.DOTALL)
_MAY_END = re.compile(rb"\}(?=\s*(?:,\s*)*(?:[\]{]|\Z))")
# How many ends of a broken event are likely enough.
_ENDS = 8
# A longer piece is no event of any profiler; to repair it would cost more than it holds.
LONGEST = 1 << 20
_WINDOW, _WINDOW_GROWS = 256, 16
# How often each byte is looked at in the mean, for an end and as part of a possible event, before
# only the nearest end is taken. Sound events take a little over 1.
_LOOKS, _TRIES = 8, 64


class EventSpans:
    """Bytes that hold events, some of them damaged, and where each seems to end.

    To look for the ends of all takes time in proportion to the bytes, whatever they are.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._looks = _LOOKS * len(data)
        self._tries = _TRIES * len(data)

    def end(self, start: int) -> int:
        """Where the object at ``start`` ends, before another event seems to begin.

        Where so many objects ended nowhere that none is looked at any more: where it may end.

        Returns:
            -1 where it does not end.
        """
        # Through a window that grows: nothing far behind is looked at for a short event's sake.
        window = _WINDOW
        while self._looks > 0:
            border = BETWEEN_EVENTS.search(self.data, start, start + window)
            stop = border.start() + 1 if border else min(start + window, len(self.data))
            end = object_end(self.data, start, stop - start)
            self._looks -= (end if end > 0 else stop) - start
            if end > 0 or border or window >= LONGEST or stop == len(self.data):
                return end
            window *= _WINDOW_GROWS
        return next(self.likely_ends(start), -1)

    def likely_ends(self, start: int) -> Iterator[int]:
        """Where the broken event at ``start`` may end, the nearest place first."""
        for number, found in enumerate(islice(_MAY_END.finditer(self.data, start), _ENDS)):
            if number and self._tries <= 0:
                break
            self._tries -= found.end() - start
            yield found.end()


def object_end(data: bytes, start: int = 0, most: int = LONGEST) -> int:
    """Where the value that opens with a bracket at ``start`` ends.

    Returns:
        The place behind it; -1 when it does not end within ``most`` bytes.
    """
    depth = 0
    for token in _TOKEN.finditer(data, start, min(len(data), start + most)):
        first = token[0]
        if first in (b"{", b"["):
            depth += 1
        elif first in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return token.end()
    return -1


def measure_nesting(data: bytes, enough: int) -> int:
    """How deep values are nested, strings aside; counted up to ``enough``."""
    depth = deepest = 0
    for token in _TOKEN.finditer(data):
        first = token[0]
        if first in (b"{", b"["):
            depth += 1
            deepest = max(deepest, depth)
            if deepest >= enough:
                break
        elif first in (b"}", b"]"):
            depth -= 1
    return deepest


# Below this a double holds nanoseconds; 101 days in µs.
EXACT_US = 2.0**43
# The time of an event that has none: the lowest number of 64 bits.
NO_TIME = -(2**63)
# No clock goes there: 140 years in µs. Start and end in ns fit into 63 bits below it.
LATEST_US = 2.0**52
# Nor does one begin five years before it counts from zero, in ns.
EARLIEST = -(2**57)


def is_coarse(ts: Any) -> bool:
    """Whether a time in µs may have lost its nanoseconds when it became a double."""
    return isinstance(ts, float) and ts > EXACT_US


def nanoseconds(value: Any) -> int:
    """One time in ns: :class:`Ns` as it is, numbers as µs; ``NO_TIME`` for anything else."""
    if isinstance(value, Ns):
        ns = int(value)
    elif isinstance(value, (int, float)) and abs(value) < LATEST_US:
        ns = round(value * 1000)  # exact for an int, which most are
    else:
        return NO_TIME
    return ns if abs(ns) < LATEST_US * 1000 else NO_TIME


KINDS = {
    "cpu_op": Kind.OP,
    "Operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "Runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "Memcpy": Kind.COPY,
    "Memset": Kind.COPY,
    "python_function": Kind.PYTHON,
}


_NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments in use. Shapes stay the bytes they came in: to decode them costs more."""

    correlation: Any = -1
    stream: Any = -1
    input_type: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")
    input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    old_input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input dims")
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    made_by: Any = msgspec.field(default=-1, name="Fwd thread id")
    values: msgspec.Raw = msgspec.field(default=_NOTHING, name="Concrete Inputs")
    number: Any = msgspec.field(default=-1, name="Ev Idx")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event, its fields in the order in which Kineto writes them (decoding is faster so)."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: Any = None
    dur: Any = None
    args: Args | None = NO_ARGS


class Document(msgspec.Struct):
    """The whole file: its events, and what it says about itself."""

    traceEvents: list[Event] | None = None  # noqa: N815 - the format's own name
    distributedInfo: Any = None  # noqa: N815
    deviceProperties: Any = None  # noqa: N815
    schemaVersion: Any = None  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815
    record_shapes: Any = None
    with_stack: Any = None
    profile_memory: Any = None
    cuda_runtime_version: Any = None
    hip_runtime_version: Any = None


class Ns(int):
    """A time that was written as microseconds with a fraction, in whole nanoseconds."""


def exact_time(text: str) -> Ns | float:
    """The nanoseconds of a number of microseconds, without the detour over a float.

    A double holds microseconds since 1970 to the nearest quarter; the text has all digits.
    """
    try:
        return Ns((Decimal(text) * 1000).to_integral_value())
    except (InvalidOperation, OverflowError, ValueError):
        return float(text)


Decode = Callable[[memoryview | bytes], list[Event]]

decode_events: Decode = msgspec.json.Decoder(list[Event]).decode
decode_events_exactly: Decode = msgspec.json.Decoder(list[Event], float_hook=exact_time).decode
decode_document: Callable[[bytes], Document] = msgspec.json.Decoder(Document).decode
decode_document_exactly: Callable[[bytes], Document] = msgspec.json.Decoder(
    Document, float_hook=exact_time
).decode

# Errors of a decoder on bytes it cannot take; RecursionError stands for "too deep".
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


_TIME = re.compile(rb'"ts"\s*:\s*(\d+(?:\.\d+)?)[\s,}]')


def earliest(data: bytearray, first: int, stop: int) -> float:
    """The earlier of the times that stand first and last in a part of a buffer, ns.

    Minus infinity where either is unknown.
    """
    times = []
    for at in (data.find(b'"ts"', first, stop), data.rfind(b'"ts"', first, stop)):
        written = _TIME.match(data, max(at, 0))
        if not written:
            return -math.inf
        times.append(float(written[1]) * 1000)
    return min(times)


# A JSON string may not hold these, and between values a space means the same.
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
# format itself first: source text in a name has other keys.
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
# A block that was never written: it is unknown how many events it held.
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


def mend(data: bytes, decode: Callable[[bytes], T], *, whole: bool = False) -> tuple[T, str] | None:
    """One damaged object, repaired and decoded, and the counter for the repair.

    Repairs are tried from the mildest on: text, values and commas, quotes and backslashes, and
    last the object without its ``args``.

    Args:
        data: The object's bytes.
        decode: Decodes an object, or raises one of :data:`UNREADABLE`.
        whole: Whether to stop short of dropping the ``args``.

    Returns:
        ``None`` where nothing helped, ``data`` is longer than 1 MB, or has a hole.
    """
    if len(data) > LONGEST or _HOLE in data:
        return None
    tried = data
    for attempt, counter in _attempts(data, whole):
        if attempt != tried:
            tried = attempt
            with suppress(*UNREADABLE):
                return decode(attempt), counter
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

    ``decode`` decodes an array of events.
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
                raise refuse("E312", self._source, depth) from None
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
        # Bytes that inflate behind damage are garbage without end: there only samples are tried.
        if self._hopeless > _HOPELESS and self._hopeless % _SAMPLE:
            return None
        if not (mended := mend(piece, self._decode_one, whole=whole)):
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
