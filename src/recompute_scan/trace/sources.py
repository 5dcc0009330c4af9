"""Traces found and loaded, by path or by address.

Traces lie in files, folders of ranks, globs and archives, plain or compressed. The first bytes of a
file show its format, not its name.
"""

from __future__ import annotations

import errno
import functools
import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from recompute_scan.errors import InputError
from recompute_scan.files import is_file, is_there, opened
from recompute_scan.progress import paused, reading
from recompute_scan.trace.columns import DEFAULT_LIMITS, Kind, Limits, Outline, Trace, refuse
from recompute_scan.trace.kineto.reader import CHUNK, Reader
from recompute_scan.trace.sniff import (
    REPORT_SUFFIXES,
    is_sqlite,
    look_at_folder,
    look_at_members,
    look_at_names,
    refuse_report,
)
from recompute_scan.trace.streams import (
    Excerpt,
    Stream,
    inflate,
    is_remote,
    is_zip,
    list_remote,
    members,
    open_member,
    open_remote,
    shown,
    split_member,
    take,
)

_LOOKED_AT = 2000


def read(
    raw: Stream,
    source: str,
    *,
    python: bool = False,
    within: tuple[int, int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    health: dict[str, int] | None = None,
    again: bool = False,
) -> Trace:
    """The trace in a stream, plain or compressed.

    Args:
        raw: The bytes.
        source: Their name, for messages.
        python: Whether ``python_function`` events are kept.
        within: Only what overlaps this span of time is kept, ns on the trace's clock.
        limits: What is refused.
        health: Counters that the raw stream adds to while it is read.
        again: Whether a part of the stream could be read once more by its place in it; of plain
            JSON the trace then has an outline.

    Raises:
        InputError: Not JSON (``E302``), JSON but no trace (``E303``), no events (``E304``),
            compressed data without one readable event (``E307``), beyond a limit (``E310`` to
            ``E315``).
    """
    health = {} if health is None else health
    stream, compressed = inflate(raw, source, limits, health)
    # Every event is garbage by the end of its chunk, and none is part of a cycle.
    with paused():
        trace = Reader(stream, source, limits, python, health, within, CHUNK).read()
    if compressed or not again:
        trace = replace(trace, outline=None)
    if within is None and (trace.kind == Kind.OTHER).all():
        raise _another_programs(trace, source)
    return trace


def _another_programs(trace: Trace, source: str) -> InputError:
    """``E303``: Chrome's format, which many programs write, and not one event is of torch's."""
    whose = look_at_names(trace.names[code] for code in trace.name[:_LOOKED_AT].tolist())
    return InputError(
        "E303",
        f"{source} is a trace, but torch.profiler did not write it.",
        why=f"its events are {whose}" if whose else "no event is an operator, a kernel or a range",
        hint="give a trace that torch.profiler's export_chrome_trace wrote",
    )


_SUFFIXES = (".json", ".json.gz", ".json.zst")
_FILES_ONLY = (".sqlite",)  # Nsight Systems' exports; they cannot be read inside an archive
# Files of `run` next to its traces, of tlparse, and other JSON that is never a trace.
_NOT_A_TRACE = re.compile(
    r"(^|/)(chromium_events|compile_directory)\.json$|"
    r"(result|(run|so-far|flight|gradients)-rank\d+)\.json$|stacks-rank\d+\.json(\.gz|\.zst)?$"
)


def read_beside(path: Path, limits: Limits = DEFAULT_LIMITS) -> bytes | None:
    """A small file next to a trace, in a folder or in an archive; ``None`` if it is not there.

    Raises:
        InputError: It cannot be read (``E301``), leads out of the folder (``E317``), or is
            longer than an event may be (``E315``); for an archive as :func:`load`.
    """
    inside = split_member(path)
    most = limits.event_bytes
    try:
        if inside is not None:
            archive, name = inside
            if name not in members(archive, limits):
                return None
            with open_member(archive, name, str(path), limits, {}) as stream:
                data = take(stream, most + 1)
        elif is_file(path):
            _refuse_links(path.parent, [path.name])
            with opened(path) as file:
                data = file.read(most + 1)
        else:
            return None
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(data) > most:
        raise refuse("E315", str(path), most)
    return data


def _matches(path: Path) -> list[Path]:
    if is_there(path) or split_member(path):
        return [path]
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)), key=_natural)  # noqa: PTH207 - absolute patterns too
    if not matches:
        raise _unreadable(path, FileNotFoundError("No such file or folder"))
    return matches


def _in_folder(folder: Path, limits: Limits) -> list[Path]:
    # Links that lead nowhere, pipes, sockets and devices stay, to be reported.
    names = [one.name for one in folder.iterdir() if not os.path.isdir(one)]  # noqa: PTH112 - pathlib's raises
    if inside := _traces(names, (*_SUFFIXES, *_FILES_ONLY)):
        _refuse_links(folder, inside)
        return [folder / name for name in inside]
    archives = sorted(name for name in names if name.endswith(".zip"))
    if not archives:
        look = look_at_folder(names)
        raise _no_trace_in(folder, *(look or ()))
    _refuse_links(folder, archives)
    return [
        path / name
        for path in map(folder.joinpath, archives)
        for name in (_in_archive(path, limits) if is_file(path) else [""])
    ]


def _refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Somebody else's folder must not stand for files of this machine's owner."""
    home = folder.resolve()
    for name in names:
        path = folder / name
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(home):
            raise InputError(
                "E317",
                f"{folder} is refused: it holds a link that leads out of it.",
                why=f"the link is {name[:200]!r}",
                hint="replace the link with the file, or give the file's own path",
            )


def _in_archive(path: Path, limits: Limits) -> list[str]:
    names = members(path, limits)
    inside = _traces(names)
    if not inside:
        raise _no_trace_in(path, look_at_members(names))
    return inside


def _only_trace(path: Path, limits: Limits) -> str:
    inside = _in_archive(path, limits)
    if len(inside) > 1:
        raise InputError(
            "E318",
            f"{path} holds {len(inside)} traces where one is wanted.",
            hint=f"name one of them, such as {path / inside[0]}",
        )
    return inside[0]


def _traces(names: Iterable[str], suffixes: tuple[str, ...] = _SUFFIXES) -> list[str]:
    kept = [name for name in names if name.endswith(suffixes) and not _NOT_A_TRACE.search(name)]
    return sorted(kept, key=lambda name: _natural(Path(name)))


def _natural(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(int(part[:18]), "") if part.isdecimal() else (-1, part) for part in parts]


def _no_trace_in(path: Path, why: str | None = None, hint: str | None = None) -> InputError:
    return InputError(
        "E308",
        f"{path} holds no trace.",
        why=why
        or "apart from records such as result.json, no file in it ends in .json, .json.gz, "
        ".json.zst, .sqlite or .zip",
        hint=hint or "give the folder that `recompute-scan run` or the profiler wrote",
    )


def _unreadable(path: Path, error: OSError) -> InputError:
    hint = "check the path; a trace is a .json file, plain or compressed, or a folder of them"
    if error.errno == errno.EINVAL:  # `opened` takes files only
        hint = "write its content to a file, and give that file"
    why = error.strerror or str(error)
    return InputError("E301", f"Cannot read {path}.", why=why, hint=hint)


# A path, or a remote address (`s3://…`): a path would lose one of its slashes.
Address = Path | str

_HEAD = 16
# A file of this machine all the same.
_HERE = re.compile(r"(?:file|local)://", re.IGNORECASE)


def find(addresses: Sequence[Address], limits: Limits = DEFAULT_LIMITS) -> list[Address]:
    """The traces that the given files, folders, globs, archives and addresses stand for, in order.

    A folder stands for the traces in it, one a rank, and for its zip archives where it holds
    none; an archive for the traces in it; a name with ``*``, ``?`` or ``[`` that no file has,
    for its matches. Other files of ``recompute-scan run`` are passed over.

    Raises:
        InputError: A path is missing (``E301``), a folder or an archive has no trace
            (``E308``), or an archive is damaged, too large or unsafe (``E307``, ``E316``,
            ``E317``); see also :func:`recompute_scan.trace.streams.list_remote`.
    """
    found: list[Address] = []
    for address in addresses:
        here = _HERE.match(address) if isinstance(address, str) else None
        if isinstance(address, str) and is_remote(address) and not here:
            found += list_remote(address, limits)
            continue
        for each in _matches(Path(str(address)[here.end() :] if here else address)):
            if each.is_dir():
                found += _in_folder(each, limits)
            elif is_zip(each):
                found += [each / name for name in _in_archive(each, limits)]
            else:
                found.append(each)
    return found


def load(
    address: Address,
    *,
    python: bool = False,
    within: tuple[int, int] | None = None,
    outline: Outline | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Trace:
    """The trace at one address; its first bytes show its format and compression, not its name.

    A damaged file is read as far as it can be, and the trace's ``health`` counts repairs and
    losses.

    Args:
        address: A file, or a remote address. A member of an archive is named as if the archive
            were a folder, and may be left out where the archive holds one trace.
        python: Whether ``python_function`` events are kept.
        within: Only what overlaps this span of time is kept, ns on the trace's clock; of a
            database or a remote file, all.
        outline: The file's own, from an earlier reading; with ``within``, parts that hold nothing
            but later events are passed over, and not counted in ``left_out``.
        limits: What is refused.

    Raises:
        InputError: The file is missing or unreadable (``E301``), an archive is unsafe
            (``E317``) or holds several traces (``E318``), or the file is no trace or beyond a
            limit; see :func:`read`, :func:`recompute_scan.trace.nsys.load_nsys` and
            :func:`recompute_scan.trace.streams.open_remote`.
    """
    if isinstance(address, str) and is_remote(address):
        return _load_remote(address, python, limits)
    path = Path(address)
    if path.suffix in REPORT_SUFFIXES:
        raise refuse_report(path)
    if is_file(path):
        with opened(path) as file:
            head = file.read(_HEAD)
        if is_sqlite(head):
            from recompute_scan.trace.nsys import load_nsys  # noqa: PLC0415 - most are JSON

            return load_nsys(path, limits)
    inside = split_member(path) if not is_there(path) else None
    if inside is None and is_zip(path):
        inside = path, _only_trace(path, limits)
    health: dict[str, int] = {}
    how = functools.partial(read, python=python, within=within, limits=limits, health=health)
    try:
        if inside is None:
            with opened(path, buffering=0) as file, reading(file):
                if outline is not None and within is not None:
                    return how(Excerpt(file, outline.before(within[1])), str(path))
                return how(file, str(path), again=True)
        archive, member = inside
        source = str(archive / member)
        with open_member(archive, member, source, limits, health) as stream:
            return how(stream, source)
    except OSError as error:
        raise _unreadable(path, error) from None


def name_of(address: Address) -> str:
    """The trace's own name, without folders, and without secrets of a remote address."""
    return shown(str(address)).rstrip("/").rpartition("/")[2] or str(address)


def _load_remote(address: str, python: bool, limits: Limits) -> Trace:
    name = shown(address)
    with open_remote(address) as stream:
        if is_sqlite(stream.peek(_HEAD)[:_HEAD]):
            raise InputError(
                "E324",
                f"{name} is a database, which cannot be read over the network.",
                hint="copy it here first",
            )
        return read(stream, name, python=python, limits=limits, health={})
