"""What one line of a log is: whose, and whether it matters."""

from __future__ import annotations

import re

_PREFIX = re.compile(
    r"^\s*(?:\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s+)?"
    r"(?:\[\d+\]\s)?"
    r"(?:\[rank(?P<rank>\d+)\]:?\s?|\[default(?P<tee>\d+)\]:|(?P<task>\d+): "
    r"|\((?P<actor>[\w.:\- ]*pid=\d+[^)]*)\)\s?)"
)
HEADER = re.compile(r"(?P<before>.*?)Traceback \(most recent call last\):?\s*$")
TYPED = re.compile(
    r"(?:^|[\s:|])(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning)): (?P<message>.*)"
)
# A line without one of these matters only inside a traceback. Looking for each of them in turn is
# many times faster than one regular expression for all.
_TELLING = (
    *(b"Traceback (most", b"Error: ", b"Exception: ", b"Warning: ", b"Watchdog caught"),
    *(b"Root Cause (first", b"use_reentrant", b"requires_grad=True", b"AllGather"),
    *(b"checkpointed layers", b"sav", b"Sav"),
)


def is_telling(line: bytes) -> bool:
    """Whether a line matters outside a traceback too."""
    for words in _TELLING:  # noqa: SIM110 - any() takes twice as long, once for every line
        if words in line:
            return True
    return False


def owner(text: str) -> tuple[str, int | None, str]:
    """Whose line it is: a key, the rank where that is said, and the line without its prefix."""
    match = _PREFIX.match(text)
    if match is None:
        return "", None, text
    rest = text[match.end() :]
    if match["tee"] is not None and (second := _PREFIX.match(rest)) is not None:
        match, rest = second, rest[second.end() :]  # torchrun's prefix round torch's own
    rank = match["rank"] or match["tee"] or match["task"]
    key = f"rank {rank}" if rank is not None else str(match["actor"])
    return key, int(rank) if rank is not None else None, rest


def worth_a_stream(text: str) -> bool:
    """Whether an exception may begin here."""
    return HEADER.match(text) is not None or TYPED.search(text) is not None


def is_warning(text: str) -> bool:
    """Whether the line is a warning that some diagnosis looks for."""
    return any(
        words in text
        for words in ("Warning: ", "use_reentrant", "requires_grad=True", "AllGather", "ed layers")
    )
