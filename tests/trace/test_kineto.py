"""What a Kineto file says, in the spellings of torch 1.8 to today, becomes the same columns."""

from typing import Any

import numpy as np
import pytest

from recompute_scan.errors import InputError
from recompute_scan.trace.columns import Kind, Trace
from tests.trace.kineto_reading import parse
from tests.trace_builder import as_bytes, loaded, op, thread


def event(**fields: Any) -> dict[str, Any]:
    """A complete event as torch 2 writes it, with what is given here instead."""
    usual = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7}
    return {**usual, "ts": 10.0, "dur": 5.0, **fields}


def read(*events: Any, **top: Any) -> Trace:
    return parse(as_bytes({"traceEvents": list(events), **top}), "trace.json")


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cpu_op", Kind.OP),
        ("Operator", Kind.OP),  # torch 1.8 to 1.10
        ("user_annotation", Kind.ANNOTATION),
        ("gpu_user_annotation", Kind.OTHER),  # its times are wrong on some devices
        ("cuda_runtime", Kind.RUNTIME),
        ("cuda_driver", Kind.RUNTIME),
        ("Runtime", Kind.RUNTIME),
        ("kernel", Kind.KERNEL),
        ("Kernel", Kind.KERNEL),
        ("gpu_memcpy", Kind.COPY),
        ("Memcpy", Kind.COPY),
        ("gpu_memset", Kind.COPY),
        ("Memset", Kind.COPY),
        ("python_function", Kind.PYTHON),
        ("overhead", Kind.OTHER),
        (None, Kind.OTHER),
    ],
)
def test_categories_of_every_version(category: str | None, kind: Kind) -> None:
    assert read(event(cat=category)).kind[0] == kind


@pytest.mark.parametrize("name", ["ProfilerStep#3", "Optimizer.step#SGD.step"])
def test_early_versions_gave_ranges_the_category_of_operators(name: str) -> None:
    assert read(event(cat="Operator", name=name)).kind[0] == Kind.ANNOTATION


def test_an_event_without_category_is_kept_as_something_else() -> None:
    bare = event()
    del bare["cat"]
    assert read(bare).kind[0] == Kind.OTHER


@pytest.mark.parametrize(
    ("ts", "dur", "start_ns", "duration_ns"),
    [
        (1_611_085_000_000_123, 7, 1_611_085_000_000_123_000, 7_000),  # int µs since 1970
        (1_234.567, 0.25, 1_234_567, 250),
        ("12.5", "3", 12_500, 3_000),
        (-3.0, 1.0, -3_000, 1_000),
        (5.0, -1.0, 5_000, 0),
    ],
)
def test_times_are_nanoseconds(ts: Any, dur: Any, start_ns: int, duration_ns: int) -> None:
    trace = read(event(ts=ts, dur=dur))
    assert (int(trace.ts[0]) - trace.moved, int(trace.dur[0])) == (start_ns, duration_ns)
    assert trace.ts[0] >= 0


def test_events_without_a_usable_start_are_dropped_and_counted() -> None:
    trace = read(event(name="kept"), event(ts=None), event(ts="soon"), event(ts=1e300))
    assert len(trace) == 1
    assert trace.names[trace.name[0]] == "kept"
    assert trace.health == {"events_without_time": 3}


def test_events_without_duration_last_no_time_and_are_counted() -> None:
    trace = read(event(dur=None), event(dur="?"), event())
    assert trace.dur.tolist() == [0, 0, 5_000]
    assert trace.health == {"events_without_duration": 2}


def test_a_thread_is_process_and_thread_in_any_spelling() -> None:
    rows = [(7, 7), ("7", "7"), (7, "140"), (8, 7), (0, "stream 7"), (None, None)]
    trace = read(*(event(pid=pid, tid=tid) for pid, tid in rows))
    assert trace.thread.tolist() == [0, 0, 1, 2, 3, 4]
    assert trace.threads[3] == ("0", "stream 7")


@pytest.mark.parametrize("key", ["Input Dims", "Input dims"])
def test_shapes_tell_calls_apart_in_both_spellings(key: str) -> None:
    small, large = {key: [[2, 2]]}, {key: [[4, 4]]}
    trace = read(event(args=small), event(args=large), event(args=small), event())
    assert trace.dims.tolist() == [1, 2, 1, 0]
    assert trace.signatures[:2] == ("", "[[2, 2]]")


def test_types_of_inputs_tell_calls_apart() -> None:
    half = {"Input Dims": [[2]], "Input type": ["c10::Half"]}
    trace = read(event(args=half), event(args=half | {"Input type": ["float"]}))
    assert trace.dims[0] != trace.dims[1]


@pytest.mark.parametrize(
    ("value", "number"),
    [(12, 12), ("12", 12), (-1, -1), ("x", -1), (None, -1), (2**63, -1), (1.5, -1)],
)
def test_numbers_in_args(value: Any, number: int) -> None:
    args = {"Sequence number": value, "correlation": value}
    trace = read(event(args=args))
    assert (int(trace.sequence[0]), int(trace.correlation[0])) == (number, number)


def test_null_fields_mean_unknown() -> None:
    trace = read(event(args=None), event(name=None, cat=None, pid=None, tid=None))
    assert len(trace) == 2
    assert (trace.sequence.tolist(), trace.stream.tolist()) == ([-1, -1], [-1, -1])


def test_only_events_with_an_interval_count() -> None:
    trace = read(
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        {"ph": "i", "name": "[memory]", "pid": 7, "tid": 7, "ts": 3, "args": {"Bytes": 8}},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 99},
        {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": 3},
        event(),
    )
    assert [trace.names[code] for code in trace.name] == ["aten::mm"]


def test_a_bare_array_of_events_is_a_trace() -> None:
    trace = parse(b"\n " + as_bytes([event(), event(name="aten::add")]), "trace.json")
    assert trace.names == ("aten::mm", "aten::add")


def test_top_level_facts() -> None:
    trace = read(event(), distributedInfo={"rank": 3, "world_size": 8}, schemaVersion=1)
    assert trace.rank == 3
    assert trace.metadata["distributedInfo"]["world_size"] == 8
    assert read(event()).rank is None
    assert read(event(), distributedInfo={"rank": "3"}).rank is None


def test_columns_stand_in_the_order_of_the_file() -> None:
    trace = loaded(thread(op("outer", op("first"), op("second"))))
    assert [trace.names[code] for code in trace.name] == ["outer", "first", "second"]
    assert np.all(np.diff(trace.ts) > 0)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "E302"),
        (b"Traceback (most recent call last):", "E302"),
        (b'{"traceEvents": [', "E302"),
        (b"\x80\x02}q\x00.", "E302"),
        (b"3", "E303"),
        (b'"traceEvents"', "E303"),
        (b"{}", "E303"),
        (b'{"traceEvents": null}', "E303"),
        (b'{"traceEvents": {"ph": "X"}}', "E303"),
        (b'{"traceEvents": [1, 2]}', "E303"),
        (b"[[]]", "E303"),
        (b"[]", "E304"),
        (b'{"traceEvents": []}', "E304"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "E304"),
    ],
)
def test_what_is_no_trace_is_said(data: bytes, code: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(data, "some.json")
    assert caught.value.code == code
    assert "some.json" in caught.value.what
    assert caught.value.why


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (rb"half\ud83d!", "half\ufffd!"),
        (rb"half\udc00", "half\ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"whole\ud83d\ude00 \ud800", "whole\U0001f600 \ufffd"),
        (rb"text \\ud800 \ud800", "text \\ud800 \ufffd"),
        (b"not utf-8 \xff", "not utf-8 \ufffd"),
        (b"bell \x07", "bell  "),
        (b"two\nlines", "two lines"),
    ],
)
def test_broken_text_is_repaired_and_counted(written: bytes, name: str) -> None:
    data = as_bytes([event(name="@"), event(name="sound")]).replace(b"@", written)
    trace = parse(data, "trace.json")
    assert trace.names == (name, "sound")
    assert trace.health == {"text_repaired": 1}


def test_sound_text_is_left_alone() -> None:
    trace = read(event(name="\U0001f600 \x00 \\ud800"))
    assert trace.names == ("\U0001f600 \x00 \\ud800",)
    assert trace.health == {}
