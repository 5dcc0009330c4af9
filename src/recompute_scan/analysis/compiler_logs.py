"""Where the compiler's graphs lie: beside a trace, or in a folder or file of their own.

Known are what `run` writes, the folder that ``TORCH_TRACE`` names, what tlparse makes of it, and
text that a program printed under ``TORCH_LOGS=aot_graphs``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from msgspec import Struct

from recompute_scan import trace as traces
from recompute_scan.compiled.structured import (
    MARK,
    VERSION,
    Record,
    is_structured,
    read_records,
    read_text_log,
)
from recompute_scan.errors import InputError
from recompute_scan.files import opened
from recompute_scan.run_info import compiled_name
from recompute_scan.trace import Address, Limits

_OWN = re.compile(r"compiled-rank(\d{1,6})\.log$")
_TORCHS = re.compile(r"dedicated_log_torch_trace_(?:rank_(\d{1,6})(?=[_.]))?\w*\.log$")
# tlparse copies the log whole; of several ranks each has a folder.
_TLPARSE = "raw.log"
_TLPARSE_RANK = re.compile(r"rank_?(\d{1,6})$")
_TEXT = (".log", ".txt", ".out", ".err")
_MOST_FILES = 2000
_LONGEST_LINE = 1 << 24
_LARGEST = 1 << 32
_HEAD_LINES = 50


class CompilerLog(Struct, frozen=True):
    """The compiler's records of one rank.

    Attributes:
        rank: The rank.
        name: The file's own name.
        records: The records, in order.
        others: Older logs of the same rank in the same folder, which were left aside.
    """

    rank: int
    name: str
    records: list[Record]
    others: int = 0


def records_beside(trace: Address, rank: int, limits: Limits) -> list[Record] | None:
    """The records of the rank of a trace: those that `run` wrote, else the only ones there.

    Raises:
        InputError: They are there, and cannot be read.
    """
    if isinstance(trace, str):  # a remote address
        return None
    data = traces.read_beside(trace.with_name(compiled_name(rank)), limits)
    if data is not None:
        return list(read_records(data.decode("utf-8", "replace").split("\n")))
    if not trace.parent.is_dir():
        return None
    found = [log for log in _logs_in(trace.parent, limits, rank) if not log.others]
    return next((log.records for log in found if log.rank == rank), None)


def logs_alone(address: Address, limits: Limits) -> tuple[CompilerLog, ...]:
    """The compiler's logs that a folder or a file holds, one a rank; empty where there are none.

    Raises:
        InputError: A log cannot be read, or its graphs are larger than an event may be (``E315``).
    """
    path = Path(address)
    if path.is_dir():
        return _logs_in(path, limits)
    if not path.is_file():
        return ()
    logs = _read(path, limits).items()
    return tuple(CompilerLog(rank, path.name, some) for rank, some in logs if _compiled(some))


def is_text(address: Address) -> bool:
    """Is it called like a log, and like no trace?"""
    return Path(address).suffix in _TEXT


def _logs_in(folder: Path, limits: Limits, rank: int | None = None) -> tuple[CompilerLog, ...]:
    """The logs in a folder, one for each rank, or of one rank: of several the last begun."""
    found: dict[int, list[tuple[str, Path, list[Record]]]] = defaultdict(list)
    for path, told in _candidates(folder):
        if None not in (rank, told) and rank != told:
            continue
        for number, records in _read(path, limits).items():
            if _compiled(records):
                found[number if told is None else told].append((_begun(path), path, records))
    logs = []
    for number, each in sorted(found.items()):
        _, path, records = max(each, key=lambda one: one[:2])
        logs.append(CompilerLog(number, path.name, records, len(each) - 1))
    return tuple(logs)


def _candidates(folder: Path) -> list[tuple[Path, int | None]]:
    """Files that may be logs, with their rank where their name tells it; those named so alone."""
    names = sorted(islice((one.name for one in folder.iterdir()), _MOST_FILES))
    for pattern, log in ((_OWN, "{}"), (_TORCHS, "{}"), (_TLPARSE_RANK, f"{{}}/{_TLPARSE}")):
        named = [
            (folder / log.format(name), int(match[1]) if match[1] else None)
            for name in names
            if (match := pattern.match(name))
        ]
        if kept := [one for one in named if _lies_in(folder, one[0])]:
            return kept
    others = [_TLPARSE] if _TLPARSE in names else [one for one in names if one.endswith(_TEXT)]
    files = [folder / name for name in others]
    return [(file, None) for file in files if _lies_in(folder, file)]


def _lies_in(folder: Path, file: Path) -> bool:
    """Is it a file of sensible size that lies there, and no link that leads elsewhere?"""
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return False
        return file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def _read(path: Path, limits: Limits) -> dict[int, list[Record]]:
    """The records of a log of either kind, by rank; empty for any other file."""
    try:
        with opened(path) as file:
            head = list(islice(_lines(file), _HEAD_LINES))
            file.seek(0)
            if any(map(is_structured, head)):
                return {0: _bounded(path, read_records(_lines(file)), limits)}
            every = read_text_log(line for line in _lines(file) if MARK in line)
            return {rank: _bounded(path, iter(some), limits) for rank, some in every.items()}
    except OSError as error:
        raise InputError(
            "E301",
            f"Cannot read {path}.",
            why=error.strerror or str(error),
            hint="check who may read it",
        ) from None


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Its lines; one that is longer than any that is needed comes in pieces."""
    while line := file.readline(_LONGEST_LINE):
        yield line.decode("utf-8", "replace").rstrip("\r\n")


def _bounded(path: Path, records: Iterator[Record], limits: Limits) -> list[Record]:
    kept, size = [], 0
    for record in records:
        size += len(record.payload) + 1000
        if size > limits.event_bytes:
            raise InputError(
                "E315",
                f"{path}: the compiler's graphs in it take more than {limits.event_bytes:,} bytes.",
                hint="if they really do, lift the limit with --max-event-bytes",
            )
        kept.append(record)
    return kept


def _compiled(records: list[Record]) -> bool:
    return any(record.name != VERSION for record in records)


def _begun(path: Path) -> str:
    """When a log was begun, as its first line tells it; in the order of time within a year."""
    with opened(path) as file:
        head = next(_lines(file), "")
    return head[head.find("V") :][:21]
