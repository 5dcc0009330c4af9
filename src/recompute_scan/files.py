"""One way to open what others wrote, files of ours that appear whole, and folders of runs.

Another's file may be a named pipe, a device or a link to one, which would be waited for without an
end, or it may be larger than the memory. Every reader opens its files here.

Each run has a folder below one for the script, which names the newest:

    recompute-scan-out/.gitignore
    recompute-scan-out/train/2026-11-26-1/result.json, report.html, …
    recompute-scan-out/train/latest -> 2026-11-26-1

Where links cannot be made, ``latest`` is a file that holds the name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeVar, overload

from recompute_scan.errors import InputError, UsageError

_T = TypeVar("_T")

# More than any file has that is read as a whole: results, run records, settings.
LARGEST = 256 << 20
_PIECE = 1 << 20
# The arguments of this process, from whoever started it: `recompute-scan explain <(command)`.
_HELD = re.compile(r"/dev/stdin|(?:/dev|/proc/self)/fd/\d{1,9}")
# Of an opening that waits for no other process.
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


@overload
def opened(path: Path, *, buffering: Literal[0], held: bool = False) -> FileIO: ...
@overload
def opened(path: Path, *, held: bool = False) -> BinaryIO: ...
def opened(path: Path, *, buffering: int = -1, held: bool = False) -> FileIO | BinaryIO:
    """A file, to read its bytes; neither opening nor reading waits for another process.

    Args:
        path: Its path.
        buffering: 0 for the file without a buffer.
        held: Whether the path is one that a person gave to this command: then ``/dev/stdin`` and
            ``/dev/fd/63`` are read to their end, whatever they are.

    Raises:
        OSError: It cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    if held and _HELD.fullmatch(str(path)):
        return path.open("rb", buffering)
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "no file has a null byte in its name", str(path))
    # Looked at before it is opened, too: opening a device may do something.
    _refuse_special(path, path.stat().st_mode)
    file = _Regular(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_WAIT))
    try:
        _refuse_special(path, os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return BufferedReader(file) if buffering else file


class _Regular(FileIO):
    """A file that ends where there is nothing to read: of some in /proc there never is."""

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(buffer) or 0

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(-1 if size is None else size) or b""

    def readall(self) -> bytes:
        return super().readall() or b""


def content(path: Path, most: int = LARGEST, *, held: bool = False) -> bytes:
    """A whole file.

    Raises:
        OSError: As :func:`opened`, or it has more than ``most`` bytes.
    """
    with opened(path, held=held) as file:
        data = bytearray()
        # A read takes memory for all that it may give.
        while len(data) <= most and (piece := file.read(min(_PIECE, most + 1 - len(data)))):
            data += piece
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return bytes(data)


def read(path: Path, most: int = LARGEST, *, held: bool = False) -> bytes:
    """A whole file, as :func:`content`.

    Raises:
        InputError: It cannot be read (``E301``).
    """
    try:
        return content(path, most, held=held)
    except OSError as error:
        raise InputError("E301", f"Cannot read {path}.", why=error.strerror) from None


def _refuse_special(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        why = "it is a pipe, a socket or a device, not a file"
        raise OSError(errno.EINVAL, why, str(path))


def is_there(path: Path) -> bool:
    """Whether there is such a file. A name that is longer than the system takes is none's."""
    return os.path.exists(path)  # noqa: PTH110 - pathlib's raises


def is_file(path: Path) -> bool:
    """Whether it is a regular file; of a link that leads nowhere, or to no possible name, no."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib's raises


def write(path: Path, text: str, *, force: bool = False) -> None:
    """Write a whole file or none; see :func:`written`."""
    with written(path, force=force) as partial:
        partial.write_text(text, encoding="utf-8", errors="surrogateescape")


@contextmanager
def written(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A file to fill in the folder of ``path``, which it becomes at the end if nothing went wrong.

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


def made(path: Path) -> BinaryIO:
    """Open a new file to write to, and to read what was written, in place of one or of a link that
    is there: nothing is written through a link that somebody put there.

    Raises:
        OSError: It cannot be made.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), "w+b")


def make_new(path: Path) -> None:
    """Make an empty file, as :func:`made`, for what writes to it by its name."""
    made(path).close()


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
        with made(partial) as file:
            file.write(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def new_version(path: Path, data: bytes) -> Path:
    """A new file in another's folder, with its rights, to take its place.

    Raises:
        OSError: The other is read-only, or the folder cannot be written.
    """
    now = path.stat()
    if not now.st_mode & 0o222 or not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from None
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(name).chmod(stat.S_IMODE(now.st_mode))
            with suppress(OSError):
                os.chown(name, now.st_uid, now.st_gid)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def refuse_existing(*paths: Path | None, force: bool, others: Iterable[Path | None] = ()) -> None:
    """Refuse to write over what is there, or twice to one file, before any work is done for it.

    Raises:
        UsageError: One of ``paths`` is there (``E209``), or, also with ``force``, it is no file, or
            one file with another output (``E208``). The ``others`` may be there.
    """
    outputs: dict[str, Path] = {}
    for one in filter(None, (*paths, *others)):
        for name in (f"{one}", f"{one}.part"):  # as `written` calls it first
            if (other := outputs.setdefault(os.path.realpath(name), one)) is not one:
                why = f"another output, {other}, goes there too"
                raise UsageError("E208", f"Cannot write {one}.", why=why, hint="name two files")
    for path in filter(None, paths):
        if path.exists() and not path.is_file() and not path.is_symlink():
            raise UsageError("E208", f"Cannot write {path}.", why="It is no regular file")
        if not force and (path.exists() or path.is_symlink()):
            raise UsageError("E209", f"{path} exists.", hint="--force overwrites it")


_LONG = re.compile(rb"[0-9]{20}")
_MOST_DIGITS = 20


def decoded(data: bytes, kind: type[_T]) -> _T:
    """An object of this class from its JSON.

    Raises:
        msgspec.MsgspecError: It is not JSON, or not of this class, or a whole number in it has
            more than 20 digits: msgspec itself takes any.
    """
    import msgspec  # noqa: PLC0415 - `--help` needs none

    def bounded(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise msgspec.ValidationError(f"The number {digits[:20]}… is too large")
        return int(digits)

    found = msgspec.json.decode(data, type=kind)
    if _LONG.search(data):
        json.loads(data, parse_int=bounded)
    return found


def document(value: Any, indent: int = 2) -> bytes:
    """Indented JSON, ending in a line end; characters that UTF-8 cannot hold become ``?``."""
    import msgspec  # noqa: PLC0415 - see above

    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:  # the name of a file that is no UTF-8
        encoded = msgspec.json.encode(encodable(msgspec.to_builtins(value)))
    return msgspec.json.format(encoded, indent=indent) + b"\n"


def encodable(value: Any) -> Any:
    """The same plain data, with what UTF-8 cannot hold replaced by question marks."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    return value


HOME = Path("recompute-scan-out")
_LATEST = "latest"
# The day and a number; of processes that some launcher has started, a name for their job.
_OWN = re.compile(r"\d{4}-\d\d-\d\d-(\d{1,6})", re.ASCII)
_RUN = re.compile(rf"{_OWN.pattern}|launched(?:-[\w.-]{{1,130}})?", re.ASCII)


def is_run(folder: Path, *, alone: bool = False) -> bool:
    """Whether a path names a run's folder; ``alone``: one that no other run writes to."""
    name = (_OWN if alone else _RUN).fullmatch(folder.name)
    return bool(name) and folder.parent.parent.name == HOME.name


def newest_run(address: str) -> str:
    """The newest run in a script's folder; anything else stays as it is."""
    mark = Path(address) / _LATEST
    try:
        name = str(mark.readlink()) if mark.is_symlink() else content(mark, 200).decode()
    except (OSError, ValueError):
        return address
    run = mark.with_name(name) if _RUN.fullmatch(name) else mark
    return str(run) if run.is_dir() and not run.is_symlink() else address


def new_run(folder: Path, *, several: bool = False) -> Path:
    """Make a new run's folder, below its script's.

    Args:
        folder: The script's folder.
        several: Whether a launcher of the user's has started this process as one of several. All
            processes of a job get the same folder, as far as the environment identifies the job.

    Raises:
        UsageError: It cannot be made (``E206``).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(folder.parent / ".gitignore"):
            write_whole(folder.parent / ".gitignore", b"*\n")
        if several:
            return folder / "-".join(["launched", *_job()])
        today = date.today().isoformat()
        there = [_OWN.fullmatch(one.name) for one in folder.glob(f"{today}-*")]
        number = max((int(one[1]) for one in there if one), default=0)
        while True:
            number += 1
            with suppress(FileExistsError):  # made by another run in the meantime
                (folder / f"{today}-{number}").mkdir()
                return folder / f"{today}-{number}"
    except OSError as error:
        what = f"Cannot write to the output folder {folder}."
        raise UsageError("E206", what, why=error.strerror) from None


def _job() -> list[str]:
    """Words that all processes of a job have in common, and no other job as far as possible.

    torchrun and accelerate choose a run id or a free port for each job, unless the user names one.
    Restarts are counted alike everywhere only where one node has all processes.
    """
    names = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    words = [os.environ.get(name, "none") for name in names]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("GROUP_WORLD_SIZE") == "1" and restarts != "0":
        words.append(restarts)
    return [re.sub(r"[^\w.]", "-", one)[:30] for one in words if one not in ("", "none")]


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that has left nothing."""
    with suppress(OSError):
        folder.rmdir()


def make_newest(run: Path) -> None:
    """Let the script's folder stand for this run."""
    mark = run.with_name(_LATEST)
    partial = run.with_name(f".{_LATEST}-{os.getpid()}")
    with suppress(OSError):
        try:
            partial.symlink_to(run.name)
            partial.replace(mark)
        except OSError:
            partial.unlink(missing_ok=True)
            write_whole(mark, run.name.encode())


def all_runs(home: Path = HOME) -> list[Path]:
    """The folders of runs, by script and time."""
    found = [one for one in home.glob("*/*") if is_run(one) and one.is_dir()]
    own = [one for one in found if not (one.is_symlink() or one.parent.is_symlink())]
    return sorted(own, key=_by_time)


def _by_time(run: Path) -> tuple[str, str, int]:
    own = _OWN.fullmatch(run.name)
    if own is None:
        return run.parent.name, date.fromtimestamp(run.stat().st_mtime).isoformat(), 0
    return run.parent.name, run.name[:10], int(own[1])


def runs_of(script: Path) -> list[Path]:
    """Those of one script's folder."""
    return [one for one in all_runs(script.parent) if one.parent.name == script.name]


def remove(run: Path) -> None:
    """Remove a run's folder; where it was the newest, the one before it takes its place.

    Raises:
        OSError: It cannot be removed.
    """
    was = newest_run(str(run.parent)) == str(run)
    shutil.rmtree(run)
    others = runs_of(run.parent)
    if was and others:
        make_newest(others[-1])
    elif was:
        run.with_name(_LATEST).unlink(missing_ok=True)
