"""The records that the compiler writes while it compiles: torch's structured trace, or a text log.

A folder named by ``TORCH_TRACE`` has one such file for each rank (``torch/_logging/_internal.py``,
since torch 2.3), and `run` writes the same records, those that are needed, in the same form: a line
with a JSON object, then the lines of its payload, each behind a tab.

What a program prints under ``TORCH_LOGS=aot_graphs`` is read into the same records: every line
begins with glog's prefix, the compilation and the log's name, and a graph is the lines from its
heading to the next one. Which code was compiled, and on which stack, is not there.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

MARK = "[__aot_graphs]"
# Rank where there are several, process, compilation, text. The attempt is behind an underscore.
_LOG_LINE = re.compile(
    r"(?:\[rank(\d{1,6})\]:)?[A-Z]\d{4} [\d:.]{8,20} (\d{1,10}) [^\]]{0,400}\] "
    r"\[(\d{1,9})/(\d{1,9})(?:_\d{1,9})?\] \[__aot_graphs\] ?(.*)",
    re.ASCII,
)
_HEADING = re.compile(r"\s*===== (Forward|Backward) graph \d+ =====")
_END = "TRACED GRAPH"
# What is needed of all that torch writes: names of records, and of the artifacts among them.
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
        name: What it is: ``aot_forward_graph``; of an artifact its own name.
        fields: What else its line says.
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
        """Who called what is compiled, outermost first; ``None`` where that is not said."""
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


def is_structured(line: str) -> bool:
    """Is it a line of a structured trace that begins a record?"""
    return _LINE.match(line) is not None


def read_records(lines: Iterable[str]) -> Iterator[Record]:
    """The needed records of a structured trace, in order; lines that are none are passed over."""
    files: dict[int, str] = {}
    fields: dict[str, Any] | None = None
    payload: list[str] = []
    for line in lines:
        if line.startswith("\t"):
            if fields is not None:
                payload.append(line[1:])
            continue
        if fields is not None:
            yield Record(wanted_name(fields) or "", fields, "\n".join(payload), files)
        fields, payload = _parse(line, files), []
    if fields is not None:
        yield Record(wanted_name(fields) or "", fields, "\n".join(payload), files)


def _parse(line: str, files: dict[int, str]) -> dict[str, Any] | None:
    """What a line says, where it begins a record that is needed; names of files are noted."""
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
    """The records of each rank, or of each process in order where no ranks are told.

    Lines of anything else are passed over.
    """
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    open_: dict[tuple[str, str], tuple[Record, list[str]]] = {}

    def close(whose: tuple[str, str]) -> None:
        if whose in open_:
            record, body = open_.pop(whose)
            found[whose].append(Record(record.name, record.fields, "\n".join(body)))

    for line in lines:
        match = _LOG_LINE.search(line) if MARK in line else None
        if match is None:
            continue
        rank, process, frame, version, said = match.groups()
        # Ranks that are told are one process each.
        whose = (rank or "", "" if rank else process)
        heading = _HEADING.match(said)
        if heading or said.startswith(_END):
            close(whose)
        if heading:
            name = "aot_forward_graph" if heading[1] == "Forward" else "aot_backward_graph"
            where = {"frame_id": int(frame), "frame_compile_id": int(version)}
            open_[whose] = Record(name, {name: {}, **where}, ""), []
        elif whose in open_:
            open_[whose][1].append(said)
    for whose in list(open_):
        close(whose)
    ranks: dict[int, list[Record]] = {}
    for (rank, _), records in found.items():
        ranks[int(rank) if rank else len(ranks)] = records
    return ranks
