"""Where the objects of a text end and how deep they are nested, whether it is sound or not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

# Matches at every quote, closed or not: a failing match would be tried again at each quote.
STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
# A place that looks like the border of two events, whatever the file's layout.
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{\s*\"(?:ph|cat|name|pid|tid|ts|args|s|id)\"\s*:")
_TOKEN = re.compile(STRING + rb"|[{}\[\]]", re.DOTALL)
_MAY_END = re.compile(rb"\}(?=\s*(?:,\s*)*(?:[\]{]|\Z))")
# How many ends of a broken event are likely enough.
_ENDS = 8
# A longer event is none.
_LONGEST = 1 << 20
_WINDOW, _WINDOW_GROWS = 256, 16
# How often each byte is looked at in the mean, for an end and as part of what may be an event,
# before only the nearest end is taken. Sound events take a little over 1.
_LOOKS, _TRIES = 8, 64


class EventSpans:
    """Bytes that hold events, some of them damaged, and where each seems to end.

    To look for the ends of all takes time in proportion to the bytes, whatever they are.

    Attributes:
        data: The bytes.
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
            if end > 0 or border or window >= _LONGEST or stop == len(self.data):
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


def object_end(data: bytes, start: int = 0, most: int = 1 << 20) -> int:
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
