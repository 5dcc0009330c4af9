"""Files that appear whole or not at all, are not written over unasked, and may have any name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from recompute_scan.errors import InputError, UsageError


def read(path: Path) -> bytes:
    """A whole file.

    Raises:
        InputError: It cannot be read (``E301``).
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError("E301", f"Cannot read {path}.", why=error.strerror) from None


def is_there(path: Path) -> bool:
    """Whether there is such a file. A name that is longer than the system takes is none's."""
    try:
        return path.exists()
    except OSError:
        return False


def write(path: Path, text: str, *, force: bool = False) -> None:
    """Write a whole file or none; see :func:`written`."""
    with written(path, force=force) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def written(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A file to fill beside ``path``, which it becomes at the end if nothing went wrong.

    Raises:
        UsageError: There is such a file and ``force`` was not given (``E209``), or it cannot be
            written (``E208``).
    """
    refuse_existing(path, force=force)
    partial = path.with_name(path.name + ".part")
    try:
        make_new(partial)
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError("E208", f"Cannot write {path}.", why=error.strerror) from None


def make_new(path: Path) -> None:
    """Make an empty file, in place of one or of a link that is there: who writes to it next does so
    through no link that somebody put there.

    Raises:
        OSError: It cannot be made.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def append(path: Path) -> TextIO:
    """Open a file to write at its end; never through a link.

    Raises:
        OSError: It cannot be opened, or is a link.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8", errors="replace")


def write_whole(target: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all; one that is there is replaced."""
    partial = target.with_suffix(".part")
    try:
        make_new(partial)
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse to write over what is there, before any work is done for it (``E209``)."""
    if not force and (path.exists() or path.is_symlink()):
        raise UsageError("E209", f"{path} is there already.", hint="--force writes over it")


def encodable(value: Any) -> Any:
    """The same plain data, with what UTF-8 cannot hold replaced by question marks."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    return value
