"""Traces at remote addresses (``s3://``, ``gs://``, ``hf://``, ``https://``, …), through fsspec.

A file is read as a stream, never copied to disk. fsspec finds the file system by the scheme and
says which package it needs (``fsspec.registry.known_implementations``). Over HTTP one request is
made for the whole file: many servers do not answer requests for parts. A server that sends its
readers to another host is not followed there.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import time
from typing import Any
from urllib.parse import urljoin

from recompute_scan.errors import InputError, MissingExtra
from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits, refuse_members

# Two letters at least: C:// is a drive.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "oci": "ocifs",
    "oss": "ossfs",
    "webdav": "webdav4",
}
_HTTP = ("http", "https")
# In an address of HTTP, ? begins a query, and [ is around a host.
_MAGIC, _HTTP_MAGIC = re.compile(r"[*?[]"), re.compile(r"[^?]*\*")
# The address of a host in version 6 has colons of its own.
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
    file_system, path = _file_system(address)
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
    file_system, path = _file_system(address, _LISTING_S)
    over_http = _scheme(address) in _HTTP
    try:
        if _HTTP_MAGIC.match(path) if over_http else _MAGIC.search(path):
            found = file_system.glob(path, detail=True).values()
            within = ""
        elif address.endswith("/") if over_http else file_system.isdir(path):
            found = file_system.ls(path, detail=True)
            within = path.rstrip("/") + "/"
        else:
            return [address]
        names = [entry["name"] for entry in found if entry["type"] == "file"]
        # A page of links may link anywhere.
        names = [name for name in names if name.startswith(within)]
        files = sorted({file_system.unstrip_protocol(name) for name in names})
    except Exception as error:
        raise _unreachable(address, error) from None
    if not files:
        raise _unreachable(address, FileNotFoundError())
    if len(files) > limits.members:
        raise refuse_members(shown(address), limits.members)
    return files


class _Stream(io.RawIOBase):
    """fsspec's file, whose every failure is one of ours."""

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
                raise InputError(
                    "E325",
                    f"Reading {shown(self._address)} stopped after {self._given:,} bytes.",
                    why=_why(error),
                    hint="try again, or copy the file here first",
                ) from None
            view[: len(data)] = data
        self._given += len(data)
        waited = time.monotonic() - self._began
        if data and waited > _PATIENCE_S and self._given < _LEAST_PER_S * waited:
            raise InputError(
                "E325",
                f"Reading {shown(self._address)} was given up.",
                why=f"in {waited:.0f} s {self._given:,} bytes came",
                hint="try again, or copy the file here first",
            )
        return len(data)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            super().close()


def _file_system(address: str, longest_s: int = _LONGEST_S) -> tuple[Any, str]:
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise MissingExtra("fsspec", "remote", f"Reading {shown(address)}") from None
    scheme = _scheme(address)
    if "::" in _HOST_IN_BRACKETS.sub("", address):
        raise InputError(
            "E326",
            f"{shown(address)} is a chain of addresses.",
            hint="give the address of the trace itself; compression is told by content",
        )
    try:
        if scheme in _HTTP:  # an address in brackets has colons that stand for a chain elsewhere
            return core.filesystem(scheme, **_http_options(longest_s)), address
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
            hint="s3://, gs://, hf://, https:// and fsspec's others are",
        ) from None
    except Exception as error:
        raise _unreachable(address, error) from None
    return file_system, path


def _http_options(longest_s: int) -> dict[str, Any]:
    aiohttp = importlib.import_module("aiohttp")
    # Without these a large file would be given up after five minutes, and a server's
    # compression would be undone where no limit on its size holds.
    timeout = aiohttp.ClientTimeout(total=longest_s, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    headers = {"Accept-Encoding": "identity"}
    how = {"timeout": timeout, "headers": headers, "auto_decompress": False}
    return {"client_kwargs": how | {"trace_configs": [_staying()]}}


class _Elsewhere(OSError):
    """A server sends its readers to another host: nobody asked for what is there."""


@functools.cache  # fsspec keeps a file system for each set of options
def _staying() -> Any:
    """What makes aiohttp's client follow redirects within a host only."""

    async def refuse(_session: Any, _context: Any, redirected: Any) -> None:
        answer = redirected.response
        target = answer.headers.get("Location") or answer.headers.get("URI") or ""
        if not _stays(str(answer.url), target):
            raise _Elsewhere(urljoin(str(answer.url), target))

    config = importlib.import_module("aiohttp").TraceConfig()
    config.on_request_redirect.append(refuse)
    return config


def _stays(address: str, target: str) -> bool:
    """Is a redirect's target on the same host and port? From http to https is staying, too.

    Addresses are read by what aiohttp reads them with: other readers take some of them in other
    ways.
    """
    read = importlib.import_module("yarl").URL
    try:
        before, after = read(address), read(target)
        after = after if after.scheme else before.join(after)
        upgraded = before.scheme == "http" and before.port == 80
        return after.origin() in (
            before.origin(),
            *([before.origin().with_scheme("https").with_port(None)] if upgraded else []),
        )
    except ValueError:  # a UnicodeError is one
        return False


def _scheme(address: str) -> str:
    return address.partition("://")[0].lower()


def _unreachable(address: str, error: BaseException) -> InputError:
    cause = _cause(error)
    if isinstance(cause, _Elsewhere):
        return InputError(
            "E325",
            f"Cannot read {shown(address)}.",
            why=f"the server sends its readers to another host, {shown(str(cause))}",
            hint="if you trust that address, give it, or download the file and give that",
        )
    return InputError(
        "E325",
        f"Cannot read {shown(address)}.",
        why=_why(error),
        hint="check the address, your right to read it, and the network",
    )


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
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
