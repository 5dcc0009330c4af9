"""One input changed a little: bytes, numbers, words of the formats, events of a trace, values
anywhere in a document.
"""

import gzip
import io
import json
import re
import sqlite3
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from random import Random
from typing import Any

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_WORDS = (
    b'0 -1 1e999 -0.0 NaN null true [] {} "" 1.5 2147483648 9223372036854775807 1e308 0.1 -5'
).split()
_PIECES = (
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\0", b"\xff", b"\xed\xa0\x80"),
    *(b'{"', b'"}', b"},\n{", b'"traceEvents":[', b"\x1f\x8b", b"PK\x03\x04", b"Traceback ("),
    *(b"most recent call last):\n", b"RuntimeError: ", b"[rank0]: ", b'  File "a", line 1, in b\n'),
    *(b"checkpoint_wrapper(", b"expected to be in states ", b"Trying to backward an extra time "),
    *(b"saved metadata: {'shape': torch.Size([1]), 'dtype': a ", b"Original Traceback ("),
)
_NAMES = (
    *("ProfilerStep#1", "ProfilerStep#99999999999999999999", "Optimizer.step#A.step"),
    *("CheckpointFunction", "CheckpointFunctionBackward", "AddmmBackward0", "aten::linear"),
    *("autograd::engine::evaluate_function: AddmmBackward0", "aten::convolution", "nccl:all"),
    *("recompute_scan.region?call=1", "recompute_scan.recompute?call=1", "PythonDispatchMode"),
    *("autograd::engine::evaluate_function: CheckpointFunctionBackward", "flash_fwd_kernel", ""),
)
_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy", "x", "")
_ODD: tuple[Any, ...] = (
    *(None, -1, 0, 1, 7, 2**31, 2**63, -(2**63), 10**30, 1.5, 1e300, -0.25, "7", "", [], {}, True),
    *([[4, 4]], [[]], {"a": 1}),
)

# What comes of archives and databases that were changed before.
_BROKEN = (
    *(OSError, ValueError, IndexError, EOFError, RuntimeError, MemoryError),
    *(zlib.error, zipfile.BadZipFile, sqlite3.Error, struct.error),
    AttributeError,  # before Python 3.11 no database is made of bytes
)
_FACTORS = (-1, 0, 2, 0.5, 1e6, 1e-9)
_CELLS: tuple[Any, ...] = (None, -1, 0, 1, 2**40, 2**62, -(2**63), 1.5, 1e300, "", "7", b"\xff\0")
_WITHOUT = 'ALTER TABLE "{}" DROP COLUMN "{}"'
# What a terminal, a page or a path takes for something else.
_TAILS = ("\x1b[2J", "<b>", "../../x", "\0", "\n\n# x", "`", "|", "\ud800", "\u202e", "a" * 5000)


def mutated(data: bytes, others: Sequence[bytes], chance: Random) -> bytes:
    """The input with one to four changes; ``others`` is what parts are taken from."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if chance.random() < 0.6 and (events := _events(data)):
            data = _event_changed(events, chance)
        elif chance.random() < 0.7 and (document := _document(data)) is not None:
            data = json.dumps(_value_changed(document, chance)).encode()
        else:
            inside = _INSIDE.get(data[:4]) if chance.random() < 0.8 else None
            changed = inside(data, others, chance) if inside is not None else None
            data = chance.choice(_BYTES)(data, others, chance) if changed is None else changed
    return data


def _events(data: bytes) -> list[Any] | None:
    """The events, where this is a trace of a few."""
    if len(data) > 100_000 or not data.startswith(b'{"traceEvents"'):
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    events = document["traceEvents"]
    return events if isinstance(events, list) and events else None


def _document(data: bytes) -> Any:
    """What the text stands for, where it is a document and no trace; ``None`` otherwise."""
    if len(data) > 100_000 or data[:1] not in (b"{", b"[") or data.startswith(b'{"traceEvents"'):
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _value_changed(document: Any, chance: Random) -> Any:
    """The document with one value, somewhere in it, changed, taken out, doubled or moved."""
    places: list[tuple[Any, Any]] = []
    open_ = [document]
    while open_:
        holder = open_.pop()
        keys = range(len(holder)) if isinstance(holder, list) else list(holder)
        places += [(holder, key) for key in keys]
        open_ += [holder[key] for key in keys if isinstance(holder[key], (dict, list))]
    if not places:
        return document
    holder, key = chance.choice(places)
    value = holder[key]
    alike = [other for some, at in places if type(other := some[at]) is type(value)]
    # Mostly what has the same type, or nothing would get past the first look.
    way = chance.choices(range(5), (1, 2, 4, 4, 1))[0]
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), value)
    elif way == 2:
        holder[key] = json.loads(json.dumps(chance.choice(alike)))  # a copy: it may hold this one
    elif way == 3 and isinstance(value, str):
        holder[key] = chance.choice((value + chance.choice(_TAILS), *_NAMES))
    elif way == 3 and isinstance(value, (int, float)):
        factor = chance.choice((-1, 0, 2, 10**6, 10**18) if isinstance(value, int) else _FACTORS)
        holder[key] = value * factor + chance.choice((-1, 0, 1))
    else:
        holder[key] = chance.choice((*_ODD, *_NAMES, *_TAILS))
    return document


def _member_changed(data: bytes, others: Sequence[bytes], chance: Random) -> bytes | None:
    """The archive with one of its files changed; ``None`` where it is none."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        name = chance.choice(list(files))
        plain = gzip.decompress(files[name]) if name.endswith(".gz") else files[name]
    except _BROKEN:
        return None
    changed = mutated(plain, [plain], chance)
    files[name] = gzip.compress(changed, 1, mtime=0) if name.endswith(".gz") else changed
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, content in files.items():
            archive.writestr(each, content)
    return buffer.getvalue()


def _cell_changed(data: bytes, _: Sequence[bytes], chance: Random) -> bytes | None:
    """The database with some cells changed, or a table or a column less."""
    with closing(sqlite3.connect(":memory:")) as connection:
        database: Any = connection  # Python 3.11 has what is used here
        try:
            database.deserialize(data)
            find = "SELECT name FROM sqlite_master WHERE type = 'table'"
            table = chance.choice(database.execute(find).fetchall())[0]
            columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
            column = chance.choice(columns)
            if chance.random() < 0.1:
                gone = chance.choice((f'DROP TABLE "{table}"', _WITHOUT.format(table, column)))
                database.execute(gone)
            else:
                value = chance.choice((*_CELLS, *_NAMES))
                database.execute(
                    f'UPDATE "{table}" SET "{column}" = ? WHERE abs(random()) % ? = 0',
                    (value, chance.choice((1, 2, 20))),
                )
            database.commit()
            changed: bytes = database.serialize()
        except _BROKEN:
            return None
    return changed


def _event_changed(events: list[Any], chance: Random) -> bytes:
    at = chance.randrange(len(events))
    other = events[chance.randrange(len(events))]
    way = chance.randrange(7)
    event = events[at]
    if way == 0 or not isinstance(event, dict):
        del events[at]
    elif way == 1:
        events.insert(chance.randrange(len(events) + 1), other)
    elif way == 2:
        events[at], events[chance.randrange(len(events))] = other, event
    else:
        events[at] = _field_changed(event, way, chance)
    return b'{"traceEvents": ' + json.dumps(events).encode() + b"}"


def _field_changed(event: dict[str, Any], way: int, chance: Random) -> dict[str, Any]:
    field = chance.choice(("ph", "cat", "name", "pid", "tid", "ts", "dur", "args"))
    if way == 3:
        return {key: value for key, value in event.items() if key != field}
    if way == 4:
        return event | {"name": chance.choice(_NAMES), "cat": chance.choice(_CATEGORIES)}
    if way == 5 and isinstance(event.get("args"), dict):
        names = ("Sequence number", "correlation", "stream", "Input Dims", "Ev Idx", "Input type")
        return event | {"args": event["args"] | {chance.choice(names): chance.choice(_ODD)}}
    start = event.get("ts")
    near = start + chance.uniform(-9, 9) if isinstance(start, (int, float)) else 1
    return event | {field: chance.choice((*_ODD, near))}


def _cut(data: bytes, _: Sequence[bytes], chance: Random) -> bytes:
    begin, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:begin] + data[end:] if chance.random() < 0.7 else data[:end]


def _flipped(data: bytes, _: Sequence[bytes], chance: Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _time in range(chance.choice((1, 1, 3, 20))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _with_piece(data: bytes, _: Sequence[bytes], chance: Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    times = chance.choices((1, 2, 300, 5000), (30, 6, 3, 1))[0]
    return data[:at] + chance.choice(_PIECES) * times + data[at:]


def _other_number(data: bytes, _: Sequence[bytes], chance: Random) -> bytes:
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    number = chance.choice(found)
    return data[: number.start()] + chance.choice(_WORDS) + data[number.end() :]


def _spliced(data: bytes, others: Sequence[bytes], chance: Random) -> bytes:
    other = chance.choice(others)
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


_BYTES: tuple[Callable[[bytes, Sequence[bytes], Random], bytes], ...] = (
    *(_cut, _flipped, _with_piece, _other_number, _spliced),
)
_INSIDE: dict[bytes, Callable[[bytes, Sequence[bytes], Random], bytes | None]] = {
    b"PK\x03\x04": _member_changed,
    b"SQLi": _cell_changed,
}
