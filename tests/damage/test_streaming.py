"""However a file is cut into chunks, the columns are the same; no bytes raise a foreign error."""

import gc
import gzip
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recompute_scan.errors import InputError
from recompute_scan.trace import Trace, load
from recompute_scan.trace.columns import Kind
from tests.cases.recorded import recorded
from tests.effort import examples
from tests.trace.kineto_reading import parse, read

from .make_corpus import FOLDER

COLUMNS = ("name", "kind", "thread", "ts", "dur", "sequence", "correlation", "stream", "dims")
Json = dict[str, Any]
# What reading must not change, however large the chunks are.
numbers = st.integers(-1, 2**40) | st.sampled_from(["12", None, 1.5, 2**63])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
args = st.fixed_dictionaries(
    {},
    optional={
        "Sequence number": numbers,
        "correlation": numbers,
        "stream": numbers,
        "Input Dims": values,
        "Input type": values,
        "Call stack": st.text(max_size=200),
        "anything": values,
    },
)
times = st.floats(0, 2**42) | st.integers(0, 2**50)
events = st.fixed_dictionaries(
    {"ph": st.sampled_from("XXXXMisf"), "name": st.text(max_size=40), "ts": times},
    optional={
        "cat": st.sampled_from(["cpu_op", "kernel", "python_function", "Operator", None]),
        "pid": st.integers(0, 3) | st.sampled_from(["Spans", "1"]),
        "tid": st.integers(0, 3) | st.sampled_from(["stream 7", "1"]),
        "dur": times | st.none(),
        "args": args | st.none(),
        "id": values,
    },
)


def written(document: Any, style: str) -> bytes:
    """The document as different writers lay it out."""
    if style == "kineto":
        inside = ",\n".join(
            "  {\n    " + json.dumps(event)[1:-1] + "\n  }" for event in document["traceEvents"]
        )
        head = json.dumps({**document, "traceEvents": []})
        return head.replace('"traceEvents": []', f'"traceEvents": [\n{inside}\n]').encode()
    indent = {"indent2": 2, "indent4": 4}.get(style)
    separators = (",", ":") if style == "dense" else None
    return json.dumps(document, indent=indent, separators=separators).encode()


def outcome(data: bytes, chunk: int, python: bool) -> Any:
    try:
        return comparable(read(io.BytesIO(data), "it", python=python, chunk=chunk))
    except InputError as error:
        return error.code


def comparable(trace: Trace) -> Any:
    columns = {name: getattr(trace, name).tolist() for name in COLUMNS}
    tables = (trace.names, trace.threads, trace.signatures)
    rest = (trace.rank, trace.metadata, trace.health, trace.left_out, trace.cut_at)
    return columns, tables, rest


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(events, max_size=30),
    st.sampled_from(["compact", "dense", "indent2", "indent4", "kineto"]),
    st.sampled_from([16, 100, 1000, 4096]),
    st.booleans(),
)
@example([{"ph": "X", "name": '}, {"ph": "X', "ts": 1}] * 3, "compact", 16, True)
@example(
    [{"ph": "X", "name": "a", "ts": 1, "args": {"a": [{"ph": 1}, {"ph": 2}]}}], "dense", 16, True
)
def test_small_chunks_equal_one_parse(
    listed: list[Json], style: str, chunk: int, python: bool
) -> None:
    document = {"schemaVersion": 1, "traceEvents": listed, "distributedInfo": {"rank": 2}}
    data = written(document, style)
    small = outcome(data, chunk, python)
    assert small == outcome(data, 1 << 20, python)
    kept = [
        event
        for event in listed
        if event["ph"] == "X" and (python or event.get("cat") != "python_function")
    ]
    if not kept:
        assert small == "E304"
        return
    columns, (names, _, _), (rank, _, health, _, _) = small
    assert rank == 2
    assert [names[code] for code in columns["name"]] == [event["name"] for event in kept]
    assert not {"events_repaired", "text_repaired", "events_dropped", "cut_short"} & set(health)


@pytest.mark.parametrize("chunk", [3_000, 10_000, 100_000])
@pytest.mark.parametrize("python", [True, False])
def test_a_recorded_trace_is_the_same_in_any_chunks(chunk: int, python: bool) -> None:
    path, _ = recorded("n_in_r")
    data = gzip.decompress(path.read_bytes())
    assert outcome(data, chunk, python) == outcome(data, len(data) + 10, python)


def test_python_frames_are_left_out_unless_asked_for() -> None:
    rows = [
        {"ph": "X", "cat": cat, "name": f"{cat} {number}", "ts": number, "dur": 1}
        for cat in ("cpu_op", "python_function", "kernel")
        for number in range(500)
    ]
    data = written({"traceEvents": rows}, "kineto")
    full, lean = parse(data, "it"), read(io.BytesIO(data), "it", chunk=4096)
    kept = full.kind != Kind.PYTHON
    assert (len(full), len(lean), lean.left_out) == (1500, 1000, 500)
    assert np.array_equal(full.ts[kept], lean.ts)
    assert np.array_equal(full.kind[kept], lean.kind)


@pytest.mark.parametrize("chunk", [2_000, 1 << 18])
@pytest.mark.parametrize("python", [True, False])
def test_a_span_of_time_is_what_overlaps_it(chunk: int, python: bool) -> None:
    path, _ = recorded("n_in_r")
    data = gzip.decompress(path.read_bytes())
    whole = read(io.BytesIO(data), "it", python=python)
    begin, end = (int(t) for t in np.quantile(whole.ts, (0.2, 0.4)))
    part = read(io.BytesIO(data), "it", python=python, within=(begin, end), chunk=chunk)
    kept = (whole.ts < end) & (whole.ts + whole.dur > begin)
    assert 0 < kept.sum() < len(whole) / 2
    assert part.ts.tolist() == whole.ts[kept].tolist()
    assert [part.names[code] for code in part.name] == [
        whole.names[code] for code in whole.name[kept]
    ]
    assert len(part) + part.left_out == len(whole) + whole.left_out
    assert (part.metadata, part.rank) == (whole.metadata, whole.rank)


@pytest.mark.parametrize(
    "text", ["1712195495406752.797", "1712195495406752.001", "17121954954067.5"]
)
def test_times_since_1970_keep_their_nanoseconds(text: str) -> None:
    data = b'{"traceEvents": [{"ph": "X", "name": "a", "ts": %s, "dur": 0.123}]}' % text.encode()
    trace = parse(data, "it")
    whole, _, fraction = text.partition(".")
    assert int(trace.ts[0]) == int(whole) * 1000 + int(fraction.ljust(3, "0"))
    assert int(trace.dur[0]) == 123


seeds = st.sampled_from(
    sorted(path for path in FOLDER.iterdir() if path.stat().st_size < 12_000),
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seeds, st.data())
def test_flipped_bytes_raise_only_our_own_errors(seed: Any, data: Any) -> None:
    content = bytearray(seed.read_bytes())
    if content:
        for _ in range(data.draw(st.integers(1, 8))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'"\\{}[],:\n\0'))
    outcome(bytes(content), data.draw(st.sampled_from([16, 500, 1 << 18])), python=True)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b'{"traceEvents": [', b'{"ph": "X", "name": "', b"a", b'"', b", ", b"\\", b"{",
                b"}", b"[", b"]", b'"ts": 1', b'"args": {', b"nan", b"\n", b"\xff", b"\0", b"1e999",
                b'},\n  {\n    "ph": "X"', b'}, {"ph": "X", "ts": 3', b'"tid": 7',
                b'"Input Dims": [[1]]',
            ]
        ),
        max_size=60,
    ),
    st.sampled_from([16, 1 << 18]),
)  # fmt: skip
def test_any_pieces_in_any_order_raise_only_our_own_errors(pieces: list[bytes], chunk: int) -> None:
    outcome(b'{"traceEvents": [{' + b"".join(pieces), chunk, python=False)
    outcome(b"".join(pieces), chunk, python=True)


def test_the_collector_runs_again_after_a_load_and_after_a_failure(tmp_path: Any) -> None:
    assert gc.isenabled()
    load(FOLDER / "good.json")
    assert gc.isenabled()
    with pytest.raises(InputError):
        load(FOLDER / "empty_cycle.json")
    assert gc.isenabled()
