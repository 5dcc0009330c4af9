"""torch's structured trace: the records that the compiler writes while it compiles.

A folder named by ``TORCH_TRACE`` has one such file for each rank (``torch/_logging/_internal.py``,
since torch 2.3), and `run` writes the same records, those that are needed, in the same form: a line
with a JSON object, then the lines of its payload, each behind a tab.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

# What is needed of all that torch writes: names of records, and of the artifacts among them.
WANTED = frozenset(
    {"dynamo_start", "dynamo_output_graph", "aot_forward_graph", "aot_backward_graph"}
)
CONFIG = "torch._functorch.config"
BREAK = "dynamo_graph_break_reason"
ARTIFACTS = frozenset({CONFIG, BREAK})

# A line of the log: glog's prefix, then the object.
_LINE = re.compile(r"V\d{4} [\d:.]{8,20} \d{1,10} [^\]]{0,400}\] (\{.*)$", re.ASCII)


class Record(Struct, frozen=True):
    """One record.

    Attributes:
        name: What it is: ``aot_forward_graph``; of an artifact its own name.
        fields: What else its line says.
        payload: Its text; empty where it has none.
    """

    name: str
    fields: dict[str, Any]
    payload: str

    @property
    def compile_id(self) -> str | None:
        """``frame/version``, as ranges of the profiler have it; ``None`` where it has none."""
        frame, version = self.fields.get("frame_id"), self.fields.get("frame_compile_id")
        if "compiled_autograd_id" in self.fields or not isinstance(frame, int):
            return None
        return f"{frame}/{version}" if isinstance(version, int) else None


def wanted_name(fields: dict[str, Any]) -> str | None:
    """The name of a record that is needed, ``None`` for any other."""
    artifact = fields.get("artifact")
    if isinstance(artifact, dict):
        name = artifact.get("name")
        return name if name in ARTIFACTS else None
    return next((name for name in fields if name in WANTED), None)


def read_records(text: str) -> Iterator[Record]:
    """The needed records of a structured trace, in order; lines that are none are passed over."""
    fields: dict[str, Any] | None = None
    payload: list[str] = []
    for line in text.splitlines():
        if line.startswith("\t"):
            if fields is not None:
                payload.append(line[1:])
            continue
        if fields is not None:
            yield _record(fields, payload)
        fields, payload = _parse(line), []
    if fields is not None:
        yield _record(fields, payload)


def _record(fields: dict[str, Any], payload: list[str]) -> Record:
    return Record(wanted_name(fields) or "", fields, "\n".join(payload))


def _parse(line: str) -> dict[str, Any] | None:
    match = _LINE.match(line)
    if match is None:
        return None
    try:
        fields = json.loads(match[1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or wanted_name(fields) is None:
        return None
    return fields


def write_record(fields: dict[str, Any], payload: str) -> str:
    """A record as torch writes it."""
    body = "".join(f"\n\t{line}" for line in payload.split("\n")) if payload else ""
    return f"V0101 00:00:00.000000 0 recompute_scan] {json.dumps(fields)}{body}\n"
