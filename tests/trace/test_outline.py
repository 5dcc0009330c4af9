"""A second reading of one span of time passes over what holds nothing but later events."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import fields

from recompute_scan.trace import load
from recompute_scan.trace.columns import Trace
from recompute_scan.trace.streams import Excerpt
from tests.present import present

_EVENTS = 12_000
# In µs; of two threads, one after the other in the file.
_SPAN = 2_000_000, 3_000_000


def _written(path: Path) -> Path:
    events = [
        {
            "ph": "X",
            "cat": "python_function" if number % 3 else "cpu_op",
            "name": f"call {number % 50} " + "x" * 40,
            "pid": 1,
            "tid": tid,
            "ts": 1000 * number,
            "dur": 900 if number else 1000 * _EVENTS,
            "args": {"Python id": number} if number % 3 else {"Sequence number": number},
        }
        for tid in (1, 2)
        for number in range(_EVENTS)
    ]
    text = json.dumps({"traceEvents": events, "with_stack": 1})
    path.write_bytes(gzip.compress(text.encode(), 1) if path.suffix == ".gz" else text.encode())
    return path


def _kept(trace: Trace) -> dict[str, Any]:
    different = {"left_out", "outline"}
    return {f.name: getattr(trace, f.name) for f in fields(trace) if f.name not in different}


def test_the_same_is_kept_from_less_of_the_file(tmp_path: Path) -> None:
    path = _written(tmp_path / "trace.json")
    within = _SPAN[0] * 1000, _SPAN[1] * 1000
    outline = present(load(path).outline)
    size = path.stat().st_size
    parts = list(outline.before(within[1]))
    assert sum((end or size) - begin for begin, end in parts) < size / 2
    with_it = load(path, python=True, within=within, outline=outline)
    without = load(path, python=True, within=within)
    assert len(with_it) == 2 * (1 + 1000)
    for name, value in _kept(without).items():
        assert np.array_equal(getattr(with_it, name), value), name


@pytest.mark.parametrize("until", [-1, 0, 10**18])
def test_the_end_of_the_file_is_always_read(tmp_path: Path, until: int) -> None:
    path = _written(tmp_path / "trace.json")
    outline = present(load(path).outline)
    with path.open("rb", buffering=0) as file:
        excerpt = Excerpt(file, outline.before(until))
        read = bytearray()
        buffer = memoryview(bytearray(100_000))
        while number := excerpt.readinto(buffer):
            read += buffer[:number]
    whole = path.read_bytes()
    assert read.startswith(b'{"traceEvents": [')
    assert json.loads(read)["with_stack"] == 1
    assert (bytes(read) == whole) == (until > 0)


def test_a_compressed_file_has_none(tmp_path: Path) -> None:
    assert load(_written(tmp_path / "trace.json.gz")).outline is None
