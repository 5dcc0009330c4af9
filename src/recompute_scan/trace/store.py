"""Where traces lie: files, folders of ranks, globs and archives, plain or compressed."""

from __future__ import annotations

import functools
import glob
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from recompute_scan.errors import InputError
from recompute_scan.files import is_file, is_there, opened
from recompute_scan.how_far import reading
from recompute_scan.trace.archive import is_zip, members, open_member, split_member
from recompute_scan.trace.columns import Trace
from recompute_scan.trace.formats import read
from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits, refuse_event_size
from recompute_scan.trace.looks import look_at_folder, look_at_members
from recompute_scan.trace.outline import Excerpt, Outline

_SUFFIXES = (".json", ".json.gz", ".json.zst")
_DATABASES = (".sqlite",)  # Nsight Systems' exports; they cannot be read inside an archive
# What `run` writes beside its traces, what tlparse makes, and other JSON that is never a trace.
_NOT_A_TRACE = re.compile(
    r"(^|/)(chromium_events|compile_directory)\.json$|"
    r"(result|(run|so-far|flight|gradients)-rank\d+)\.json$|stacks-rank\d+\.json(\.gz|\.zst)?$"
)


def load(
    path: Path,
    *,
    python: bool = False,
    within: tuple[int, int] | None = None,
    outline: Outline | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Trace:
    """The trace in one file, or in one member of a zip archive.

    Compression is told by the first bytes, not by the name. What is damaged is read as far as
    it can be, and the trace's ``health`` counts what was repaired or lost.

    Args:
        path: The file; a member of an archive is named as if the archive were a folder, and
            may be left out where the archive holds one trace.
        python: Whether ``python_function`` events are kept.
        within: Only what overlaps this span of time is kept, ns on the trace's clock.
        outline: The file's own, from an earlier reading; with ``within``, parts that hold nothing
            but later events are passed over, and not counted in ``left_out``.
        limits: What is refused.

    Raises:
        InputError: The file is missing or unreadable (``E301``), an archive is unsafe
            (``E317``) or holds several traces (``E318``), or the file is no trace or beyond a
            limit (see :func:`recompute_scan.trace.formats.read`).
    """
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


def read_beside(path: Path, limits: Limits = DEFAULT_LIMITS) -> bytes | None:
    """A small file beside a trace, in a folder or in an archive; ``None`` if it is not there.

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
            buffer = memoryview(bytearray(most + 1))
            filled = 0
            with open_member(archive, name, str(path), limits, {}) as stream:
                while filled <= most and (number := stream.readinto(buffer[filled:])):
                    filled += number
            data = bytes(buffer[:filled])
        elif is_file(path):
            _refuse_links(path.parent, [path.name])
            with opened(path) as file:
                data = file.read(most + 1)
        else:
            return None
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(data) > most:
        raise refuse_event_size(str(path), most)
    return data


def find(paths: Sequence[Path], limits: Limits = DEFAULT_LIMITS) -> list[Path]:
    """The trace files that the given files, folders, globs and archives stand for, in order.

    A folder stands for the traces in it, one a rank, and for its zip archives where it holds
    none; an archive for the traces in it; a name with ``*``, ``?`` or ``[`` that no file has,
    for what it matches. What ``recompute-scan run`` writes beside its traces is passed over.

    Raises:
        InputError: A path is missing (``E301``), a folder or an archive has no trace
            (``E308``), or an archive is damaged, too large or unsafe (``E307``, ``E316``,
            ``E317``).
    """
    found: list[Path] = []
    for path in paths:
        for each in _matches(path):
            refuse_special(each)
            if each.is_dir():
                found += _in_folder(each, limits)
            elif is_zip(each):
                found += _in_archive(each, limits)
            else:
                found.append(each)
    return found


def refuse_special(path: Path) -> None:
    """Refuse what is neither a file nor a folder: opening it may wait for ever (``E301``)."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # who opens it says why it cannot be
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(
            "E301",
            f"Cannot read {path}.",
            why="it is a pipe, a socket or a device, and no file",
            hint="write what it gives to a file, and give that",
        )


def _matches(path: Path) -> list[Path]:
    if is_there(path) or split_member(path):
        return [path]
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)), key=_natural)  # noqa: PTH207 - absolute patterns too
    if not matches:
        raise _unreadable(path, FileNotFoundError("No such file or folder"))
    return matches


def _in_folder(folder: Path, limits: Limits) -> list[Path]:
    # Links that lead nowhere stay, so that it is said; pipes and the like are nobody's trace.
    names = [file.name for file in folder.iterdir() if is_file(file) or not is_there(file)]
    if inside := _traces(names, (*_SUFFIXES, *_DATABASES)):
        _refuse_links(folder, inside)
        return [folder / name for name in inside]
    archives = sorted(name for name in names if name.endswith(".zip"))
    if not archives:
        look = look_at_folder(names)
        raise _no_trace_in(folder, *(look or ()))
    _refuse_links(folder, archives)
    return [trace for name in archives for trace in _in_archive(folder / name, limits)]


def _refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Somebody else's folder must not stand for files of this machine's owner."""
    home = folder.resolve()
    for name in names:
        path = folder / name
        if path.is_symlink() and not _leads_to(path).is_relative_to(home):
            raise InputError(
                "E317",
                f"{folder} is refused: it holds a link that leads out of it.",
                why=f"the link is {name[:200]!r}",
                hint="copy the file there, or name it itself",
            )


def _leads_to(link: Path) -> Path:
    """Where a link leads; one that leads round in a circle leads to itself."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # RuntimeError before Python 3.13
        return link.parent.resolve() / link.name


def _in_archive(path: Path, limits: Limits) -> list[Path]:
    names = members(path, limits)
    inside = _traces(names)
    if not inside:
        raise _no_trace_in(path, look_at_members(names))
    return [path / name for name in inside]


def _only_trace(path: Path, limits: Limits) -> str:
    names = members(path, limits)
    inside = _traces(names)
    if not inside:
        raise _no_trace_in(path, look_at_members(names))
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
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _no_trace_in(path: Path, why: str | None = None, hint: str | None = None) -> InputError:
    return InputError(
        "E308",
        f"{path} holds no trace.",
        why=why or "no file in it ends in .json, .json.gz, .json.zst, .sqlite or .zip",
        hint=hint or "give the folder that `recompute-scan run` or the profiler wrote",
    )


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(
        "E301",
        f"Cannot read {path}.",
        why=error.strerror or str(error),
        hint="check the path; a trace is a .json file, plain or compressed, or a folder of them",
    )
