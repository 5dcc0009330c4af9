"""Bytes of a trace: gzip, zstd, zip archives and remote addresses.

Damage never raises here: bytes that inflate before a damaged or cut place are returned, and a
counter shows that the rest is missing.

Zip archives are read where they lie: nothing is ever extracted to disk. A member's path is the
archive's path followed by the member's name, as if the archive were a folder.

Traces at remote addresses (``s3://``, ``gs://``, ``hf://``, ``https://``, …) are read through
fsspec as a stream, never copied to disk. fsspec finds the file system by the scheme and
names the package it needs (``fsspec.registry.known_implementations``). Over HTTP one request is
made for the whole file: many servers do not answer requests for parts. A server that sends its
readers to another host, or out of the folder that it lists, is not followed there.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import re
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator, KeysView
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol, cast
from urllib.parse import unquote, urljoin

import zstandard
from isal import igzip_lib

from recompute_scan.errors import InputError, MissingExtra
from recompute_scan.files import is_file, is_there, opened
from recompute_scan.trace.columns import DEFAULT_LIMITS, Limits, refuse
from recompute_scan.trace.health import count
from recompute_scan.trace.sniff import broken_archive

GZIP = b"\x1f\x8b"
ZSTANDARD = b"\x28\xb5\x2f\xfd"
_INPUT = 64 * 1024
# A call that meets the damage loses all that it inflates, so calls are small.
_OUTPUT = 64 * 1024
# Some exporters compress a file that is compressed already; three times has not been seen.
_LAYERS = 3
# isal's stubs call its error an instance.
_DAMAGED = cast("type[Exception]", igzip_lib.IsalError)


class Stream(Protocol):
    """A source of bytes."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the front of the buffer; the number of bytes, 0 at the end."""


def take(stream: Stream, most: int) -> bytes:
    """Up to so many bytes from the front of a stream."""
    data, filled = bytearray(most), 0
    with memoryview(data) as view:
        while filled < most and (number := stream.readinto(view[filled:]) or 0):
            filled += number
        return bytes(view[:filled])


def inflate(
    raw: Stream, source: str, limits: Limits, health: dict[str, int]
) -> tuple[Stream, bool]:
    """The stream's content without compression, and whether there was any.

    The first bytes show the compression.

    Raises:
        InputError: While reading, when it inflates beyond ``limits`` (``E310``, ``E311``).
    """
    stream: Stream = raw
    compressed = False
    for _ in range(_LAYERS):
        stream = front = _Front(stream)
        inflated: _Gzip | _Zstandard
        if front.first.startswith(GZIP):
            inflated = _Gzip(front, health)
        elif front.first.startswith(ZSTANDARD):
            inflated = _Zstandard(front, health)
        else:
            break
        stream = Bounded(inflated, source, limits)
        compressed = True
    return stream, compressed


class Bounded:
    """A stream of inflated bytes that refuses to hand out more than ``limits`` allow."""

    def __init__(self, stream: _Gzip | _Zstandard | _Member, source: str, limits: Limits) -> None:
        self._stream = stream
        self._source = source
        self._limits = limits
        self._given = 0

    def readinto(self, buffer: memoryview, /) -> int:
        """See :class:`Stream`.

        Raises:
            InputError: A bound was met (``E310``, ``E311``).
        """
        number = self._stream.readinto(buffer)
        self._given += number
        check_inflation(self._given, self._stream.consumed, self._source, self._limits)
        return number


def check_inflation(given: int, consumed: int, source: str, limits: Limits) -> None:
    """Refuse a stream that inflated beyond the limits.

    Raises:
        InputError: Too many bytes (``E310``) or too many for each compressed one (``E311``).
    """
    if given > limits.inflated_bytes:
        raise refuse("E310", source, limits.inflated_bytes)
    if given > limits.ratio_from and given > limits.ratio * consumed:
        raise refuse("E311", source, limits.ratio)


class _Front:
    """A stream with known first bytes: ``first``."""

    def __init__(self, stream: Stream) -> None:
        self.first = self._left = take(stream, len(ZSTANDARD))
        self._stream = stream

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._left:
            return self._stream.readinto(buffer) or 0
        number = min(len(buffer), len(self._left))
        buffer[:number] = self._left[:number]
        self._left = self._left[number:]
        return number


class _Gzip:
    """gzip members one after the other, zero padding between and behind them passed over."""

    def __init__(self, stream: Stream, health: dict[str, int]) -> None:
        self.consumed = 0
        self._stream = stream
        self._health = health
        self._input = memoryview(bytearray(_INPUT))
        self._member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self._pending = b""
        self._ended = False

    def readinto(self, buffer: memoryview, /) -> int:
        while not self._ended:
            data = self._inflate(min(len(buffer), _OUTPUT))
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _inflate(self, most: int) -> bytes:
        """The next piece, or nothing where there is none yet."""
        if self._member.eof:
            self._next_member()
            return b""
        fresh: memoryview | bytes = b""
        if self._member.needs_input:
            fresh = self._take()
            if not fresh:
                return self._damaged()
        try:
            return self._member.decompress(fresh, most)
        except _DAMAGED:
            return self._damaged()

    def _take(self) -> memoryview | bytes:
        if self._pending:
            pending, self._pending = self._pending, b""
            return pending
        number = self._stream.readinto(self._input) or 0
        self.consumed += number
        return self._input[:number]

    def _next_member(self) -> None:
        left = bytes(self._member.unused_data)
        while True:
            left = left.lstrip(b"\0")
            if len(left) >= len(GZIP) or not (fresh := self._take()):
                break
            left += fresh
        if left.startswith(GZIP):
            self._member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            self._pending = left
            return
        if left:
            beyond = len(left)
            while fresh := self._take():
                beyond += len(fresh)
            count(self._health, "bytes_after_end", beyond)
        self._ended = True

    def _damaged(self) -> bytes:
        count(self._health, "archive_damaged")
        self._ended = True
        return b""


class _Zstandard:
    """Zstandard frames one after the other."""

    def __init__(self, stream: Stream, health: dict[str, int]) -> None:
        self._input = _Compressed(stream)
        self._reader = zstandard.ZstdDecompressor().stream_reader(
            cast("IO[bytes]", self._input), read_size=_INPUT, read_across_frames=True
        )
        self._health = health
        self._ended = False

    @property
    def consumed(self) -> int:
        return self._input.consumed

    def readinto(self, buffer: memoryview, /) -> int:
        number = 0
        if not self._ended:
            try:
                number = self._reader.readinto(buffer[:_OUTPUT])
            except zstandard.ZstdError:
                count(self._health, "archive_damaged")
        self._ended = not number
        return number


class _Compressed:
    """A stream as the kind of file that zstandard wants."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.consumed = 0

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        number = self._stream.readinto(memoryview(data)) or 0
        self.consumed += number
        return bytes(data[:number])


class Excerpt:
    """Parts of a file as one stream; each begins with an event, so that they read as a trace.

    ``parts`` has begin and end of each, in order; ``None`` for the end of the file.
    """

    def __init__(self, file: io.RawIOBase, parts: Iterator[tuple[int, int | None]]) -> None:
        self._file = file
        self._parts = parts
        self._left = 0

    def readinto(self, buffer: memoryview, /) -> int:
        """See :class:`Stream`."""
        while not self._left:
            begin, end = next(self._parts, (None, None))
            if begin is None:
                return 0
            size = self._file.seek(0, io.SEEK_END) if end is None else end
            self._file.seek(begin)
            self._left = max(0, size - begin)
        number = self._file.readinto(buffer[: self._left]) or 0
        self._left = self._left - number if number else 0
        return number


ZIP = b"PK\x03\x04"
_DRIVE = re.compile(r"[A-Za-z]:|[/\\]")
_PIECE = 64 * 1024
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError),
    *(struct.error, UnicodeDecodeError),  # from a damaged directory at the archive's end
)


def is_zip(path: Path) -> bool:
    """Whether the file is a zip archive, by its first bytes."""
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
        # Each process needs another place in the file.
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
        raise refuse("E316", str(path), most)
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
    # As paths: `zip` and `tar` of a folder's content write "./" before each name.
    return _Opened(archive, {str(PurePosixPath(info.filename)): info for info in named})


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
            # The directory's sizes first; the inflated bytes are bounded all the same.
            check_inflation(info.file_size, info.compress_size, source, limits)
            yield Bounded(_Member(file, info.compress_size, health), source, limits)
    except _BROKEN as error:
        raise broken_archive(source, str(error)) from None


class _Member:
    def __init__(self, file: IO[bytes], consumed: int, health: dict[str, int]) -> None:
        self.consumed = consumed
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


# Two letters at least: C:// is a drive.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hf": "huggingface_hub",
    "oci": "ocifs",
    "oss": "ossfs",
    "webdav": "webdav4",
}
_HTTP = ("http", "https")
# In an address of HTTP, ? begins a query, and [ is around a host.
_MAGIC, _HTTP_MAGIC = re.compile(r"[*?[]"), re.compile(r"[^?]*\*")
# Folders that ** goes down: a server's pages may link to each other without end.
_DEEPEST = 8
_PARTS = re.compile(r"[/\\;?]")
# Up to the last slash before a wildcard.
_FOLDER = re.compile(r"[^:]+://[^/]*/(?:[^*[/]*/)*")
# The address of a host in version 6 has colons.
_HOST_IN_BRACKETS = re.compile(r"(?<=://)([^/@]*@)?\[[0-9A-Za-z:.%]*\]")
_BUFFER = 1 << 18
_CONNECT_S = 30
_SILENCE_S = 120
# A server that drips is given up too: after so long, where less came per second on the average;
# and whatever comes, after the longest time that a large trace takes.
_PATIENCE_S, _LEAST_PER_S = 60, 1000
_LISTING_S, _LONGEST_S = 300, 6 * 3600


def is_remote(text: str) -> bool:
    """Whether it is an address (``scheme://…``) rather than a path."""
    return _REMOTE.match(text) is not None


def shown(address: str) -> str:
    """The address for messages and reports: without user, password and query.

    Queries of signed addresses are as good as a password.
    """
    return re.sub(r"(://)[^/\s@]*@", r"\1", re.sub(r"\?[^\s'\")]*", "", address))


def open_remote(address: str) -> io.BufferedReader:
    """The file's bytes as a stream, to be closed by the caller; reading may raise ``E325`` too.

    Args:
        address: One file's address.

    Raises:
        MissingExtra: fsspec is not installed.
        InputError: The file cannot be reached or does not exist (``E325``), or the scheme is
            unknown or needs a package that is not installed (``E326``).
    """
    file_system, path = _file_system(address, folder=getattr(address, "folder", ""))
    # A stream of one request, in fsspec's words.
    how = {"block_size": 0} if _scheme(address) in _HTTP else {}
    try:
        file = file_system.open(path, "rb", **how)
    except Exception as error:
        raise _unreachable(address, error) from None
    return io.BufferedReader(_Stream(file, address), _BUFFER)


def list_remote(address: str, limits: Limits = DEFAULT_LIMITS) -> list[str]:
    """Addresses of the files that an address stands for, sorted.

    A glob stands for what it matches, a folder for the files in it (not in folders below it), a
    file for itself. Over HTTP a folder ends in ``/``, and it can be listed where the server
    shows its content as a page of links.

    Args:
        address: A file, a folder or a glob.
        limits: Bounds; ``members`` is the most files that are listed.

    Raises:
        MissingExtra: fsspec is not installed.
        InputError: As :func:`open_remote`; nothing matches (``E325``), or more files than
            ``limits`` allow (``E316``).
    """
    over_http = _scheme(address) in _HTTP
    typed = _FOLDER.match(address) if over_http else None
    folder = typed[0] if typed else ""
    file_system, path = _file_system(address, _LISTING_S, folder)
    try:
        if _HTTP_MAGIC.match(path) if over_http else _MAGIC.search(path):
            bound = {"maxdepth": _DEEPEST} if over_http and "**" in path else {}
            found = file_system.glob(path, detail=True, **bound).values()
        elif address.endswith("/") if over_http else file_system.isdir(path):
            found = file_system.ls(path, detail=True)
        else:
            return [address]
        names = [entry["name"] for entry in found if entry["type"] == "file"]
        # A page of links may link anywhere.
        names = [name for name in names if not folder or _stays(folder, name, folder)]
        files = sorted({_Listed(file_system.unstrip_protocol(name)) for name in names})
    except Exception as error:
        raise _unreachable(address, error) from None
    if not files:
        raise _unreachable(address, FileNotFoundError())
    if len(files) > limits.members:
        raise refuse("E316", shown(address), limits.members)
    for file in files:
        file.folder = folder
    return [*files]


class _Listed(str):
    """The address of a file in a folder that was listed: no redirect leads out of that."""

    __slots__ = ("folder",)
    folder: str


class _Stream(io.RawIOBase):
    """fsspec's file, with every failure as an :class:`InputError`."""

    def __init__(self, file: Any, address: str) -> None:
        super().__init__()
        self._file = file
        self._address = address
        self._given = 0
        self._began = time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with memoryview(buffer) as view:
            try:
                data = self._file.read(len(view))
            except Exception as error:
                raise self._failed(f"stopped after {self._given:,} bytes", _why(error)) from None
            view[: len(data)] = data
        self._given += len(data)
        waited = time.monotonic() - self._began
        if data and waited > _PATIENCE_S and self._given < _LEAST_PER_S * waited:
            raise self._failed("was given up", f"in {waited:.0f} s {self._given:,} bytes came")
        return len(data)

    def _failed(self, how: str, why: str) -> InputError:
        what = f"Reading {shown(self._address)} {how}."
        return InputError("E325", what, why=why, hint="try again, or copy the file here first")

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            super().close()


def _file_system(address: str, longest_s: int = _LONGEST_S, folder: str = "") -> tuple[Any, str]:
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise MissingExtra("fsspec", "remote", f"Reading {shown(address)}") from None
    scheme = _scheme(address)
    if "::" in _HOST_IN_BRACKETS.sub("", address):
        raise InputError(
            "E326",
            f"{shown(address)} is a chain of addresses.",
            hint="give the address of the trace itself; compression is recognized by content",
        )
    try:
        if scheme in _HTTP:  # an address in brackets has colons that stand for a chain elsewhere
            return core.filesystem(scheme, **_http_options(longest_s, folder)), address
        file_system, path = core.url_to_fs(address)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        raise InputError(
            "E326",
            f"Addresses that begin with {scheme}:// need a package that is not installed.",
            why=None if package else str(error),
            hint=f"pip install {package}" if package else None,
        ) from None
    except ValueError as error:
        raise InputError(
            "E326",
            f"{shown(address)} cannot be opened: {scheme}:// is not known.",
            why=shown(str(error)),
            hint="s3://, gs://, hf://, https:// or another fsspec scheme",
        ) from None
    except Exception as error:
        raise _unreachable(address, error) from None
    return file_system, path


def _http_options(longest_s: int, folder: str) -> dict[str, Any]:
    aiohttp = importlib.import_module("aiohttp")
    # Without these a large file would be given up after five minutes, and a server's
    # compression would be undone where no limit on its size holds.
    timeout = aiohttp.ClientTimeout(total=longest_s, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    headers = {"Accept-Encoding": "identity"}
    how = {"timeout": timeout, "headers": headers, "auto_decompress": False}
    return {"client_kwargs": how | {"trace_configs": [_staying(folder)]}}


class _Elsewhere(OSError):
    """A server sends its readers where they did not ask to go: to another host, or folder."""


@functools.cache  # fsspec keeps a file system for each set of options
def _staying(folder: str) -> Any:
    """A configuration with which aiohttp's client stays within a host, and within a folder that is
    listed, whatever pages link and redirect to.
    """

    async def refuse(_session: Any, _context: Any, asked: Any) -> None:
        headers = asked.response.headers if hasattr(asked, "response") else {}
        address, target = str(asked.url), headers.get("Location") or headers.get("URI") or ""
        if not _stays(address, target, folder):
            raise _Elsewhere(f"the server leads to another place, {urljoin(address, target)}")

    config = importlib.import_module("aiohttp").TraceConfig()
    config.on_request_start.append(refuse)
    config.on_request_redirect.append(refuse)
    return config


def _stays(address: str, target: str, folder: str = "") -> bool:
    """Is a link's or redirect's target on the same host and port, and in the folder, if any? From
    http to https is staying, too.

    Addresses are read by what aiohttp reads them with: other readers take some of them in other
    ways. A part that a server may read as ``..`` leads out of the folder.
    """
    read = importlib.import_module("yarl").URL
    try:
        before, after = read(folder or address), read(target)
        after = after if after.scheme else read(address).join(after)
        home = before.raw_path_qs.rstrip("/") + "/"
        above, path, below = f"{after.raw_path_qs}/".partition(home)
        if folder and (above or not path or ".." in _PARTS.split(unquote(below))):
            return False
        if after.scheme == "https" and (before.scheme, before.port) == ("http", 80):
            before = before.with_scheme("https").with_port(None)
        return bool(after.origin() == before.origin())
    except ValueError:  # a UnicodeError is one
        return False


def _scheme(address: str) -> str:
    return address.partition("://")[0].lower()


def _unreachable(address: str, error: BaseException) -> InputError:
    hint = "check the address, your access to it and the network"
    if isinstance(_cause(error), _Elsewhere):
        hint = "if you trust that place, give its address; else download the file"
    return InputError("E325", f"Cannot read {shown(address)}.", why=_why(error), hint=hint)


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _why(error: BaseException) -> str:
    """The cause in a line. File systems raise what their own libraries raise."""
    error = _cause(error)
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return f"the server answered {status} {getattr(error, 'message', '')}".strip()
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    text = shown(str(error)).strip()
    if isinstance(error, _Elsewhere):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
