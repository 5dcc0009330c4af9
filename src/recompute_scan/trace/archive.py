"""Zip archives of traces, read where they lie: nothing is ever extracted to disk.

A member is named by the archive's path followed by its own, as if the archive were a folder.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, KeysView
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from recompute_scan.errors import InputError
from recompute_scan.files import is_file, is_there, opened
from recompute_scan.trace.health import count
from recompute_scan.trace.kineto.sniff import broken_archive
from recompute_scan.trace.limits import Limits, refuse_members
from recompute_scan.trace.streams import Bounded, Stream, check_inflation

ZIP = b"PK\x03\x04"
_DRIVE = re.compile(r"[A-Za-z]:|[/\\]")
_HERE = re.compile(r"\A(?:\./+)+")
_PIECE = 64 * 1024
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError),
    *(struct.error, UnicodeDecodeError),  # from a damaged directory at the archive's end
)


def is_zip(path: Path) -> bool:
    """Whether the file is a zip archive, told by its first bytes."""
    try:
        with opened(path) as file:
            return file.read(len(ZIP)) == ZIP
    except OSError:
        return False


def split_member(path: Path) -> tuple[Path, str] | None:
    """The archive and the member that a path into an archive names, or ``None``."""
    for parent in path.parents:
        if is_there(parent):
            return (parent, path.relative_to(parent).as_posix()) if is_file(parent) else None
    return None


def members(path: Path, limits: Limits) -> KeysView[str]:
    """The names of the files in an archive, in its order.

    Raises:
        InputError: It is damaged (``E307``), holds too many files (``E316``), or a link or a
            name that leads out of it (``E317``).
    """
    return _opened(path, limits).files.keys()


class _Opened(NamedTuple):
    """An archive that is open, and its files by their names."""

    archive: zipfile.ZipFile
    files: dict[str, zipfile.ZipInfo]


def _opened(path: Path, limits: Limits) -> _Opened:
    try:
        now = path.stat()
        # A process of its own needs a place in the file of its own.
        seen = (os.getpid(), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
        return _open(path, limits.members, seen)
    except _BROKEN as error:
        raise broken_archive(str(path), str(error)) from None


# Of each rank several members are asked for: an archive's directory is as long as all its ranks.
@functools.lru_cache(maxsize=1)
def _open(path: Path, most: int, _: tuple[int, ...]) -> _Opened:
    archive = zipfile.ZipFile(path)
    infos = archive.infolist()
    if len(infos) > most:
        raise refuse_members(str(path), most)
    for info in infos:
        if why := _unsafe(info):
            raise InputError(
                "E317",
                f"{path} is refused: it holds a member that {why}.",
                why=f"the member is {info.filename[:200]!r}",
                hint="an honest archive of traces has plain files only; pack it anew",
            )
    # A name that begins with NUL is none.
    named = (info for info in infos if info.filename and not info.is_dir())
    # As `zip` and `tar` of a folder's content write them, "./" is before each name.
    return _Opened(archive, {_HERE.sub("", info.filename): info for info in named})


@contextmanager
def open_member(
    path: Path, name: str, source: str, limits: Limits, health: dict[str, int]
) -> Iterator[Stream]:
    """One member's bytes as a stream, damage counted as in :mod:`recompute_scan.trace.streams`.

    Raises:
        InputError: As :func:`members`, or there is no such member (``E301``), or it is
            encrypted or packed in an unknown way (``E307``).
    """
    opened = _opened(path, limits)
    info = opened.files.get(name)
    if info is None:
        raise InputError("E301", f"Cannot read {source}.", why=f"{path.name} has no such member")
    try:
        with opened.archive.open(info) as file:
            # What it says of itself first; what comes out is bounded all the same.
            check_inflation(info.file_size, info.compress_size, source, limits)
            yield Bounded(_Member(file, health), lambda: info.compress_size, source, limits)
    except _BROKEN as error:
        raise broken_archive(source, str(error)) from None


class _Member:
    def __init__(self, file: IO[bytes], health: dict[str, int]) -> None:
        self._file = file
        self._health = health

    def readinto(self, buffer: memoryview, /) -> int:
        try:
            data = self._file.read(min(len(buffer), _PIECE))
        except (zipfile.BadZipFile, zlib.error, EOFError):
            count(self._health, "archive_damaged")
            return 0
        buffer[: len(data)] = data
        return len(data)


def _unsafe(info: zipfile.ZipInfo) -> str | None:
    name = info.orig_filename
    if stat.S_ISLNK(info.external_attr >> 16):
        return "is a link"
    if _DRIVE.match(name):
        return "has an absolute name"
    if ".." in PurePosixPath(name.replace("\\", "/")).parts:
        return "leads out of the archive"
    return None
