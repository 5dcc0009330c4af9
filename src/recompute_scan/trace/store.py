"""Where traces lie: files and folders of ranks, plain or compressed."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from recompute_scan.errors import InputError
from recompute_scan.trace.columns import Trace
from recompute_scan.trace.kineto import parse

_GZIP = b"\x1f\x8b"
_SUFFIXES = (".json", ".json.gz")
# What `run` writes beside its traces, and other JSON that is never a trace.
_NOT_A_TRACE = re.compile(r"(result|run-rank\d+)\.json$|stacks-rank\d+\.json(\.gz)?$")


def load(path: Path) -> Trace:
    """The trace in one file; gzip is told by its first bytes, not by its name.

    Raises:
        InputError: The file is missing or unreadable (``E301``), its gzip is broken
            (``E307``), or it is no trace (see :func:`recompute_scan.trace.kineto.parse`).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                "E307",
                f"{path} is gzip, but cannot be inflated.",
                why=str(error),
                hint="copy the file again; it may have been cut short",
            ) from None
    return parse(data, str(path))


def find(paths: Sequence[Path]) -> list[Path]:
    """The trace files that the given files and folders stand for, in a natural order.

    A folder stands for the ``.json`` and ``.json.gz`` files in it, one a rank; what
    ``recompute-scan run`` writes beside its traces is passed over.

    Raises:
        InputError: A path is missing (``E301``), or a folder has no trace (``E308``).
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise _unreadable(path, FileNotFoundError("No such file or folder"))
            found.append(path)
            continue
        inside = [
            file
            for file in path.iterdir()
            if file.name.endswith(_SUFFIXES) and not _NOT_A_TRACE.search(file.name)
        ]
        if not inside:
            raise InputError(
                "E308",
                f"{path} holds no trace.",
                why="no file in it ends in .json or .json.gz",
                hint="give the folder that `recompute-scan run` or the profiler wrote",
            )
        found.extend(sorted(inside, key=_natural))
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(
        "E301",
        f"Cannot read {path}.",
        why=error.strerror or str(error),
        hint="check the path; a trace is a .json or .json.gz file, or a folder of them",
    )
