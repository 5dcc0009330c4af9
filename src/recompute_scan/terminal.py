"""A terminal's abilities, text that does nothing to it, and our lines on it."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import fstat
from typing import TextIO

_COLUMNS = 80
# Prose in longer lines is hard to read.
_MOST_COLUMNS = 110

# Control, format (bidi, zero-width, tags), lone surrogate, line and paragraph separator.
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Codes that we write ourselves, of colours.
_CODES = re.compile(r"(\x1b\[[0-9;]*m)")
# By these a CI service knows commands: GitHub Actions, Azure Pipelines, TeamCity.
_CI_COMMAND = re.compile(r"(^[^\S\n]*:)(?=:)|(##)(?=\[|vso\[|teamcity\[)", re.MULTILINE)


def printable(text: str, *, keep: str = "\n\t", codes: bool = False) -> str:
    """Whole lines as they may be printed: nothing unseen but what is in ``keep``, no command of a
    CI service. With ``codes`` colours stay.
    """
    parts = _CODES.split(text) if codes else [text]
    parts[::2] = [inert(part, keep=keep) for part in parts[::2]]
    return _CI_COMMAND.sub(lambda found: f"{found[1] or found[2]} ", "".join(parts))


def inert(text: str, *, keep: str = "") -> str:
    r"""The text with every unseen character spelled out (``\x1b``, ``\u202e``).

    Characters in ``keep`` stay as they are. The length is not limited.
    """
    # printable ASCII, which is nearly everything, needs no look at each character
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spell(char) if char not in keep else char for char in text)


def patch_name(name: str) -> str:
    r"""A file's name in a diff's header, as git and GNU patch quote it: ``"a/new\012line"``."""
    if inert(name) == name and '"' not in name and "\\" not in name:
        return name + "\t" * (" " in name)  # a blank would end it
    return f'"{"".join(map(_quoted, name))}"'


def _quoted(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if unicodedata.category(char) not in UNSEEN:
        return char
    lost = "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", lost))


def _spell(char: str) -> str:
    if unicodedata.category(char) not in UNSEEN:
        return char
    if char in _SHORT:
        return _SHORT[char]
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def colored(stream: TextIO | None) -> bool:
    """Whether to write ANSI codes: on a terminal, unless ``NO_COLOR`` or ``FORCE_COLOR`` is set.

    See https://no-color.org and https://force-color.org; an empty value says nothing.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Is it one? There is no stream where it was closed before Python began, and a script may put
    an object in its place that can only write.
    """
    with suppress(ValueError):  # it was closed or detached
        return bool(getattr(stream, "isatty", bool)())
    return False


def width(stream: TextIO | None) -> int:
    """How many columns to write: the terminal's, from 80 to 110; 80 elsewhere."""
    if stream is None or not is_terminal(stream):
        return _COLUMNS
    return min(max(columns(stream), _COLUMNS), _MOST_COLUMNS)


def columns(stream: TextIO) -> int:
    """The terminal's own number of columns; 80 where it has none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):  # no terminal of the system's
        return _COLUMNS


def fresh_line(stream: TextIO | None) -> str:
    """The text that moves a terminal's cursor to the beginning of a line; empty for other streams.

    As many blanks as a line has columns, and a return: from the beginning of a line they fill it,
    to be written over, and behind other text (a progress bar, a line without an end) they go on to
    the next.
    """
    if stream is None or not is_terminal(stream):
        return ""
    return " " * columns(stream) + "\r"


def file_at(descriptor: int) -> tuple[int, int] | None:
    """The file at a descriptor, by device and number; ``None`` where it is closed."""
    try:
        found = fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def still(stream: TextIO | None, descriptor: int, file: tuple[int, int] | None) -> TextIO | None:
    """The stream, or another to its file where the script has closed or detached it.

    ``None`` where the descriptor leads elsewhere by now.
    """
    if stream is None or file_at(descriptor) != file:
        return None
    with suppress(ValueError):
        if not getattr(stream, "closed", False):
            return stream
    return os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="replace", buffering=1)


@contextmanager
def unless_closed() -> Iterator[None]:
    """The body prints; nothing is printed where the script has closed what it prints to."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


@contextmanager
def without_lines(descriptor: int, unwanted: re.Pattern[bytes]) -> Iterator[None]:
    """Leave out lines that compiled code writes to a file descriptor while the body runs.

    For libraries that no setting silences. Everything else that is written there is passed on.

    Args:
        descriptor: 1 or 2; where it is closed there is nothing to do.
        unwanted: Matches such a line from its beginning.
    """
    try:
        target = os.dup(descriptor)
    except OSError:
        yield
        return
    try:
        with tempfile.TemporaryFile() as caught:
            _flush(descriptor)
            os.dup2(caught.fileno(), descriptor)
            try:
                yield
            finally:
                _flush(descriptor)
                os.dup2(target, descriptor)
                caught.seek(0)
                kept = b"".join(line for line in caught if not unwanted.match(line))
                while kept:
                    kept = kept[os.write(target, kept) :]
    finally:
        os.close(target)


def _flush(descriptor: int) -> None:
    """Write what Python's stream holds, then what C's does, in the order in which a process's end
    would; C's standard error holds nothing.
    """
    with suppress(Exception):  # the script's own object may be there, or none
        (sys.stdout if descriptor == 1 else sys.stderr).flush()
    if descriptor == 1:
        import ctypes  # noqa: PLC0415 - few need it

        with suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).fflush(None)
