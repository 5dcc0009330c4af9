"""The compiler's records, from torch's structured trace or from a text log.

A folder named by ``TORCH_TRACE`` has one structured trace for each rank
(``torch/_logging/_internal.py``, since torch 2.3), and tlparse copies it. `run` writes the records
that are needed in the same form: a line with a JSON object, then the lines of its payload, each
behind a tab.

A program prints text under ``TORCH_LOGS=aot_graphs``: every line begins with glog's prefix, the
compilation and the log's name, and a graph is the lines from its heading to the next one. The
compiled code and its stack are not there.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from msgspec import Struct, field

from recompute_scan import trace as traces
from recompute_scan.errors import InputError
from recompute_scan.files import opened
from recompute_scan.result.run_record import compiled_name
from recompute_scan.trace import Address, Limits

MARK = "[__aot_graphs]"
# Rank where there are several, process, compilation, text. The attempt is behind an underscore.
_LOG_LINE = re.compile(
    r"(?:\[rank(\d{1,6})\]:)?[A-Z]\d{4} [\d:.]{8,20} (\d{1,10}) [^\]]{0,400}\] "
    r"\[(\d{1,9})/(\d{1,9})(?:_\d{1,9})?\] \[__aot_graphs\] ?(.*)",
    re.ASCII,
)
_HEADING = re.compile(r"\s*===== (Forward|Backward) graph \d+ =====")
_END = "TRACED GRAPH"
# The records that are needed, and the artifacts that are.
WANTED = frozenset(
    {"dynamo_start", "dynamo_output_graph", "aot_forward_graph", "aot_backward_graph"}
)
CONFIG = "torch._functorch.config"
BREAK = "dynamo_graph_break_reason"
VERSION = "torch_version"
ARTIFACTS = frozenset({CONFIG, BREAK, VERSION})
# A name of a file with the number that stacks have for it.
_NAME = "str"
# Frames of a stack that are looked at: no program calls as deep.
_DEEPEST = 1000
# A line of the log: the rank where there are several, glog's prefix, then the object.
_LINE = re.compile(
    r"(?:\[rank\d+\]:)?V\d{4} [\d:.]{8,20} \d{1,10} [^\]]{0,400}\] (\{.*)$", re.ASCII
)


class CompileFrame(Struct, frozen=True):
    """One call on a stack."""

    file: str
    function: str
    line: int


class Record(Struct, frozen=True):
    """One record.

    Attributes:
        name: Such as ``aot_forward_graph``; an artifact has the artifact's name.
        fields: The rest of its line.
        payload: Its text; empty where it has none.
        files: Names of files by the numbers that stacks have for them.
    """

    name: str
    fields: dict[str, Any]
    payload: str
    files: Mapping[int, str] = field(default_factory=dict)

    @property
    def compile_id(self) -> str | None:
        """``frame/version``, as ranges of the profiler have it; ``None`` where it has none."""
        frame, version = self.fields.get("frame_id"), self.fields.get("frame_compile_id")
        if "compiled_autograd_id" in self.fields or not isinstance(frame, int):
            return None
        return f"{frame}/{version}" if isinstance(version, int) else None

    @property
    def stack(self) -> tuple[CompileFrame, ...] | None:
        """The stack on which the code is compiled, outermost first; ``None`` where unknown."""
        started = self.fields.get("dynamo_start")
        frames = started.get("stack") if isinstance(started, dict) else None
        if not isinstance(frames, list):
            return None
        found = []
        for frame in frames[-_DEEPEST:]:
            one = frame if isinstance(frame, dict) else {}
            file, name, line = (one.get(key) for key in ("filename", "name", "line"))
            known = self.files.get(file) if isinstance(file, int) else file
            found.append(
                CompileFrame(str(known or ""), str(name), line if isinstance(line, int) else 0)
            )
        return tuple(found)


def wanted_name(fields: dict[str, Any]) -> str | None:
    """The name of a record that is needed, ``None`` for any other."""
    artifact = fields.get("artifact")
    if isinstance(artifact, dict):
        name = artifact.get("name")
        return name if name in ARTIFACTS else None
    return next((name for name in fields if name in WANTED), None)


def read_records(lines: Iterable[str]) -> Iterator[Record]:
    """The needed records of a structured trace, in order; lines that are none are passed over."""
    files: dict[int, str] = {}
    fields: dict[str, Any] | None = None
    payload: list[str] = []
    for line in chain(lines, [""]):
        if line.startswith("\t"):
            payload.append(line[1:])
            continue
        if fields is not None:
            yield Record(wanted_name(fields) or "", fields, "\n".join(payload), files)
        fields, payload = _parse(line, files), []


def _parse(line: str, files: dict[int, str]) -> dict[str, Any] | None:
    """A line's fields, where it begins a record that is needed; names of files are noted."""
    match = _LINE.match(line)
    if match is None:
        return None
    try:
        fields = json.loads(match[1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    match fields.get(_NAME):
        case [str(name), int(number)]:
            files[number] = name
    return fields if wanted_name(fields) is not None else None


def write_record(fields: dict[str, Any], payload: str) -> str:
    """A record as torch writes it."""
    body = "".join(f"\n\t{line}" for line in payload.split("\n")) if payload else ""
    return f"V0101 00:00:00.000000 0 recompute_scan] {json.dumps(fields)}{body}\n"


def read_text_log(lines: Iterable[str]) -> dict[int, list[Record]]:
    """The records of each rank, or of each process in order where the log has no ranks.

    Lines of anything else are passed over.
    """
    found: dict[tuple[str, str], list[tuple[str, dict[str, Any], list[str]]]] = defaultdict(list)
    open_: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        match = _LOG_LINE.search(line) if MARK in line else None
        if match is None:
            continue
        rank, process, frame, version, text = match.groups()
        # A rank that has a number is one process.
        writer = (rank or "", "" if rank else process)
        if heading := _HEADING.match(text):
            name = "aot_forward_graph" if heading[1] == "Forward" else "aot_backward_graph"
            where = {"frame_id": int(frame), "frame_compile_id": int(version)}
            body = open_[writer] = []
            found[writer].append((name, {name: {}, **where}, body))
        elif text.startswith(_END):
            open_.pop(writer, None)
        elif writer in open_:
            open_[writer].append(text)
    ranks: dict[int, list[Record]] = {}
    for (rank, _), graphs in found.items():
        records = [Record(name, fields, "\n".join(body)) for name, fields, body in graphs]
        ranks[int(rank) if rank else len(ranks)] = records
    return ranks


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
    for path, named in _candidates(folder):
        if None not in (rank, named) and rank != named:
            continue
        for number, records in _read(path, limits).items():
            if _compiled(records):
                found[number if named is None else named].append((_begun(path), path, records))
    logs = []
    for number, each in sorted(found.items()):
        _, path, records = max(each, key=lambda one: one[:2])
        logs.append(CompilerLog(number, path.name, records, len(each) - 1))
    return tuple(logs)


def _candidates(folder: Path) -> list[tuple[Path, int | None]]:
    """Files that may be logs, with the rank in their name; a file with a log's name goes first."""
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
            if any(map(_LINE.match, head)):
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
    """The time in a log's first line, as text that sorts by time within a year."""
    with opened(path) as file:
        head = next(_lines(file), "")
    return head[head.find("V") :][:21]
