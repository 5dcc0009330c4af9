"""torch's structured trace: the records that the compiler writes while it compiles.

A folder named by ``TORCH_TRACE`` has one such file for each rank (``torch/_logging/_internal.py``,
since torch 2.3), and `run` writes the same records, those that are needed, in the same form: a line
with a JSON object, then the lines of its payload, each behind a tab.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

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
