"""What one line of a log is: whose, and whether it matters."""

from __future__ import annotations

import re

# What programs put before every line. Each ends with the one blank that belongs to it, so that
# the indentation of what follows stays.
_STAMP = re.compile(r"\s*\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?(?:\s|$)")
_RANK = re.compile(
    r"\s*(?:\[rank(?P<rank>\d+)\]:?\s?|\[default(?P<tee>\d+)\]:|(?P<task>\d{1,5}): "
    r"|\((?P<actor>[\w.:\- ]*pid=\d+[^)]*)\)\s?)"
)
_OTHERS = re.compile(
    r"> ?"  # a quotation
    r"|\[\d+\] (?=\[rank)"  # a count of lines
    r"|\d{1,3}(?:\.\d{1,3}){3}: "  # pdsh, with the host's address
    r"|[\w.]+-\d+ +\| "  # docker compose
    r"|(?:ERROR|WARNING|INFO|CRITICAL|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./\-]+:\d+\] ?"  # vLLM
)
_MOST_PREFIXES = 6
_DIGITS = re.compile(r"\d")
_BOX = "│".encode()

# Notebooks make links of places: "File [~/a.py:12](http://…), in f(x)".
_LINK = re.compile(r"\[([^\]\s]*\.py(?::\d+)?)\]\(https?://[^)\s]*\)")

HEADER = re.compile(r"(?P<before>.*?)Traceback \(most recent call last\)(?::?\s*| ─*[╮|]?\s*)$")
_TYPE = r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning)): (?P<message>.*)"
TYPED = re.compile(rf"(?:^|[\s:|*`]){_TYPE}")
# An exception that is named without a traceback: the line says nothing else, or says that
# something failed. One that stands in a sentence is spoken of.
LOOSE = re.compile(
    r"(?:[\s*_`>\[\]]*|.*\b(?:ERROR|CRITICAL|FATAL)\b.{0,120}?[\s:\]]"
    rf"|.*\b(?:[Ff]ailed with|[Uu]ncaught|[Uu]nhandled)\b.{{0,40}}?[\s:]){_TYPE}"
)


def is_telling(line: bytes) -> bool:
    """Whether a line matters outside a traceback too.

    Looking for each word in turn is many times faster than one regular expression for all, and
    twice as fast as a loop over them.
    """
    return (
        b"Error: " in line
        or b"File " in line
        or b"Traceback (most" in line
        or b"Exception: " in line
        or b"Warning: " in line
        or b"ollective" in line
        or b"ProcessGroupNCCL" in line
        or b"Root Cause (first" in line
        or b"xitcode" in line
        or b"return code = -" in line
        or b"interrupted by signal" in line
        or b"_MISMATCH" in line
        or b"use_reentrant" in line
        or b"requires_grad=True" in line
        or b"AllGather" in line
        or b"checkpointed layers" in line
        or b".py](http" in line
        or _BOX in line
    )


def owner(text: str) -> tuple[str, int | None, bool, str]:
    """Whose line it is: a key, the rank where that is said, whether a time stands before it, and
    the line without its prefixes.
    """
    key, rank, stamped = "", None, False
    for _ in range(_MOST_PREFIXES):
        if (match := _RANK.match(text)) is not None:
            number = match["rank"] or match["tee"] or match["task"]
            if number is not None:
                rank, key = int(number), f"rank {number}"
            else:
                key = match["actor"]
        elif not stamped and (match := _STAMP.match(text)) is not None:
            stamped = True
        elif (match := _OTHERS.match(text)) is None:
            break
        text = text[match.end() :]
    if ".py" in text and "](http" in text:
        text = _LINK.sub(r"\1", text)
    return key, rank, stamped, text


def shape(text: str) -> str:
    """The text with every digit made a 0, as the prefixes of one program's lines agree."""
    return _DIGITS.sub("0", text)


def is_warning(text: str) -> bool:
    """Whether the line is a warning that some diagnosis looks for."""
    return any(
        words in text
        for words in ("Warning: ", "use_reentrant", "requires_grad=True", "AllGather", "ed layers")
    )
