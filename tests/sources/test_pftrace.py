"""Perfetto traces: the answers are those of the JSON of the same recording, and nothing breaks."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import InputError
from recompute_scan.result import to_json
from recompute_scan.trace import Kind, Trace, find, load
from recompute_scan.trace.columns import KIND_NAMES
from recompute_scan.trace.formats import read
from recompute_scan.trace.limits import Limits
from recompute_scan.trace.perfetto.packets import is_perfetto
from recompute_scan.trace.perfetto.slices import OPEN, pair
from tests.effort import some
from tests.sources import pftrace_builder as build

TRACES = Path(__file__).resolve().parents[2] / "traces"
RECORDINGS = (
    *(f"{name}/trace-rank0" for name in ("plain_none", "plain_once", "plain_twice")),
    *(f"{name}_llama_fsdp/trace-rank0" for name in ("doubled", "repaired")),
    *(f"versions/2.14.1/{name}" for name in ("n_in_n", "n_outside", "selective_matmuls")),
    *(f"versions/2.3.1/{name}" for name in ("fsdp1_r_in_wrapper_n", "n_layers_in_n_stack")),
    *(f"public/{name}" for name in ("a100-resnet-ddp", "v100-megatron-tp2-rank0", "v100-torchrec")),
    *(f"public/{name}" for name in ("cpu-only-gloo-rank34", "mi300x-resnet-checkpointed")),
)
# What the format leaves out: who recorded it, on what; of render stages, what copies are for. Times
# count from another moment.
NOT_TOLD = {"ranks", "environment", "health", "start_us", "host_copies"}
OF_THE_DEVICE = {"peak_tflops", "peak_source", "mfu", "hfu"}


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    return found


def small() -> dict[str, Any]:
    """One forward operator, one node and one kernel."""
    events = [
        {"cat": "cpu_op", "name": "aten::linear", "ts": 1.0, "dur": 9.5, "tid": 7}
        | {"args": {"Ev Idx": 0, "Sequence number": 3, "Input Dims": [[2, 3], []]}},
        {"cat": "cpu_op", "name": "aten::addmm", "ts": 2.0, "dur": 3.0, "tid": 7}
        | {"args": {"Ev Idx": 1, "Input Dims": [[2]], "Input type": ["float"]}},
        {"cat": "user_annotation", "name": "epoch", "ts": 0.5, "dur": 11.0, "tid": 7}
        | {"args": {"Ev Idx": 2, "External id": 4}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 3.0, "dur": 1.0, "tid": 7}
        | {"args": {"cbid": 211, "correlation": 5}},
        {"cat": "kernel", "name": "gemm", "ts": 90.0, "dur": 4.0, "pid": 0, "tid": 7}
        | {"args": {"correlation": 5, "stream": 7, "device": 0, "grid": [1, 1, 1]}},
    ]
    whole = [{"ph": "X", "pid": 7, **event} for event in events]
    return {"baseTimeNanoseconds": 1_790_000_000 * 10**9, "traceEvents": whole}


def read_bytes(data: bytes, **how: Any) -> Trace:
    return read(io.BytesIO(data), "a.pftrace", **how)


def rows(trace: Trace) -> Counter[tuple[Any, ...]]:
    """The events as people would read them, from the first one's start on."""
    kept = np.flatnonzero(trace.kind != Kind.OTHER)
    start = int(trace.ts[kept].min())
    return Counter(
        (
            int(trace.kind[row]),
            trace.names[trace.name[row]],
            trace.threads[trace.thread[row]],
            int(trace.ts[row]) - start,
            int(trace.dur[row]),
            int(trace.sequence[row]),
            int(trace.correlation[row]),
            int(trace.stream[row]),
            int(trace.bytes[row]),
            trace.signatures[trace.dims[row]],
        )
        for row in kept.tolist()
    )


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two documents differ by more than rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = (one.keys() | other.keys()) - NOT_TOLD
        return [d for key in keys for d in differences(one.get(key), other.get(key), key)]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return [d for first, second in pairs for d in differences(first, second, at)]
    if isinstance(one, float) and isinstance(other, float):
        return [] if other == pytest.approx(one, rel=1e-6, abs=1e-6) else [at]
    return [] if one == other else [at]


@pytest.mark.parametrize("name", some(RECORDINGS, 3))
def test_the_result_is_that_of_the_json(tmp_path: Path, name: str) -> None:
    recorded = document(name)
    (tmp_path / "json").mkdir()
    beside = tmp_path / "json" / "trace.json"
    beside.write_text(json.dumps(recorded))
    path = tmp_path / "trace.pftrace"
    path.write_bytes(build.pftrace(recorded))
    expected, found = (json.loads(to_json(analyse([each]))) for each in (beside, path))
    assert set(differences(expected, found)) <= OF_THE_DEVICE


@pytest.mark.parametrize("name", ["plain_twice/trace-rank0", "public/mi300x-resnet-checkpointed"])
def test_every_event_is_that_of_the_json(name: str) -> None:
    recorded = document(name)
    expected = read(io.BytesIO(json.dumps(recorded).encode()), "a.json")
    found = read_bytes(build.pftrace(recorded, stages=False))
    assert rows(found) == rows(expected)
    assert found.health == {}


def test_render_stages_are_kernels_and_copies() -> None:
    recorded = document("public/a100-resnet-ddp")
    as_slices = rows(read_bytes(build.pftrace(recorded, stages=False)))
    as_stages = rows(read_bytes(build.pftrace(recorded)))

    def without_names(found: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
        return Counter({(*key[:1], *key[2:8], *key[9:]): 0 for key in found})

    # A copy's stage is called Memcpy, without where from and where to, and has no bytes.
    assert without_names(as_stages) == without_names(as_slices)
    assert {key[1] for key in as_stages if key[0] == Kind.KERNEL} == {
        key[1] for key in as_slices if key[0] == Kind.KERNEL
    }


def test_kinds_without_categories() -> None:
    trace = read_bytes(build.pftrace(small()))
    said = {
        trace.names[n]: KIND_NAMES[k].upper() for n, k in zip(trace.name, trace.kind, strict=True)
    }
    assert said == {
        "aten::linear": "OP",
        "aten::addmm": "OP",
        "epoch": "ANNOTATION",
        "cudaLaunchKernel": "RUNTIME",
        "gemm": "KERNEL",
    }
    assert trace.metadata["baseTimeNanoseconds"] == 1_790_000_000 * 10**9 + 500


def test_a_part_of_it_has_the_clock_of_the_whole() -> None:
    data = build.pftrace(small())
    whole = read_bytes(data)
    part = read_bytes(data, within=(0, 1000))
    assert [part.names[code] for code in part.name] == ["aten::linear", "epoch"]
    assert part.ts.tolist() == [500, 0]
    assert whole.ts.min() == 0


def test_a_folder_of_them_is_a_run(tmp_path: Path) -> None:
    for name in ("rank1.pftrace", "rank0.pftrace.gz"):
        (tmp_path / name).write_bytes(build.pftrace(small()))
    found = find([tmp_path])
    assert [Path(each).name for each in found] == ["rank0.pftrace.gz", "rank1.pftrace"]
    assert len(load(found[0])) == 5


@pytest.mark.parametrize(
    "data",
    [b'\n{"traceEvents": []}', b"\n\n[", b'\n"text"', b"\r\n{", b"", b"\n", b"{", b"\n\xff\xff"],
)
def test_json_is_not_taken_for_it(data: bytes) -> None:
    assert not is_perfetto(data)


def test_a_trace_of_another_program_is_said(tmp_path: Path) -> None:
    other = build.names(["draw"]) + build.begin(10**9, 1, 1) + build.end(10**9 + 5, 1)
    for data in (other, build.track(1, 7), build.packet(build.number(8, 5))):
        with pytest.raises(InputError) as caught:
            read_bytes(data)
        assert caught.value.code == "E330"


# How slices are written


def test_names_mean_what_was_written_last_before_them() -> None:
    beside = [build.beside("Ev Idx", n) for n in range(3)]
    data = build.track(1, 7, 7)
    for name, at in (("aten::mm", 0), ("aten::bmm", 1)):
        start = 10**9 + 100 * at
        data += build.names([name]) + build.begin(start, 1, 1, beside[at])
        data += build.end(start + 50, 1)
    trace = read_bytes(data)
    assert [trace.names[code] for code in trace.name] == ["aten::mm", "aten::bmm"]


def test_a_number_may_stand_before_its_name() -> None:
    """protobuf's own classes write fields in the order of their numbers."""
    events = [
        build.piece(4, build.number(4, value) + build.piece(10, name))
        for name, value in (("Ev Idx", 0), ("Sequence number", 70_000), ("correlation", 5))
    ]
    data = build.names(["aten::mm"]) + build.begin(10**9, 1, 1, *events)
    trace = read_bytes(data + build.end(10**9 + 4, 1))
    assert (trace.kind[0], trace.sequence[0], trace.correlation[0]) == (Kind.OP, 70_000, 5)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_slices_that_touch_keep_their_ends(in_blocks: bool) -> None:
    """In the order of time each end closes what was opened last; in blocks the order tells."""
    spans = [(0, 90), (10, 20), (20, 30), (30, 30), (40, 80), (50, 60)]
    if in_blocks:
        edges = [(start, True) for start, _ in spans] + [(end, False) for _, end in spans]
        expected = [end for _, end in spans]
    else:
        edges = [(0, True), (10, True), (20, False), (20, True), (30, False), (30, True)]
        edges += [(30, False), (40, True), (50, True), (60, False), (80, False), (90, False)]
        expected = [90, 20, 30, 30, 80, 60]
    time = np.array([at for at, _ in edges], np.int64)
    begins = np.array([opens for _, opens in edges], np.bool_)
    assert pair(np.ones(len(edges), np.int64), time, begins).tolist() == expected


def test_a_slice_without_an_end_lasts_no_time() -> None:
    time, track = np.array([5, 7], np.int64), np.ones(2, np.int64)
    assert pair(track, time, np.array([True, True])).tolist() == [OPEN, OPEN]
    data = build.names(["aten::mm"]) + build.begin(10**9, 1, 1, build.beside("Ev Idx", 0))
    assert read_bytes(data).health == {"events_without_duration": 1}


def test_packets_that_were_compressed_together() -> None:
    plain = build.pftrace(small(), packed=False)
    data = build.packet(build.piece(50, zlib.compress(plain)))
    assert rows(read_bytes(data)) == rows(read_bytes(plain))


# Hostile files


def test_wherever_it_is_cut_the_rest_is_read_or_refused() -> None:
    data = build.pftrace(small(), packed=False)
    for end in range(len(data)):
        try:
            trace = read_bytes(data[:end])
        except InputError as error:
            assert error.code in ("E302", "E304", "E330")
        else:
            assert len(trace) <= 5


def test_any_bytes_give_a_trace_or_one_of_our_errors() -> None:
    chance = random.Random(21)
    sound = build.pftrace(small(), packed=False)
    for _ in range(600):
        data = bytearray(sound)
        for _ in range(chance.choice((1, 2, 8, 60))):
            at = chance.randrange(len(data))
            data[at] = chance.randrange(256)
            if chance.random() < 0.1:
                del data[at : at + chance.randrange(40)]
        try:
            trace = read_bytes(bytes(data))
        except InputError:
            continue
        assert (trace.dur >= 0).all()
        assert trace.name.max() < len(trace.names)
        assert trace.thread.max() < len(trace.threads)
        assert trace.dims.max() < len(trace.signatures)


def test_a_number_without_an_end_costs_its_packet_alone() -> None:
    head = build.names(["aten::mm"])
    whole = build.begin(10**9, 1, 1, build.beside("Ev Idx", 0)) + build.end(10**9 + 9, 1)
    trace = read_bytes(head + build.packet(build.number(8, 1) + b"\xff" * 30) + whole)
    assert len(trace) == 1
    assert trace.health == {"events_dropped": 1}


def test_values_nested_without_end_are_no_shape() -> None:
    value = b""
    for _ in range(5000):
        value = build.piece(12, value)
    event = build.piece(4, build.piece(10, "Input Dims") + value)
    data = build.names(["aten::mm"]) + build.begin(10**9, 1, 1, build.beside("Ev Idx", 0), event)
    assert read_bytes(data).signatures == ("",)


def test_a_packet_of_a_million_fields_ends_soon() -> None:
    data = build.packet(build.number(8, 1) + build.number(1, 1) * 10**6)
    with pytest.raises(InputError) as caught:
        read_bytes(data)
    assert caught.value.code == "E330"


@pytest.mark.parametrize(
    ("data", "limits", "code"),
    [
        (
            b"\x0a" + build.varint(10**9) + build.number(8, 1) + bytes(10**7),
            Limits(event_bytes=10**6),
            "E315",
        ),
        (
            build.packet(build.piece(50, zlib.compress(bytes(10**6)))),
            Limits(ratio_from=1000, ratio=20),
            "E311",
        ),
        (
            build.packet(build.piece(50, zlib.compress(bytes(10**6)))),
            Limits(event_bytes=10**5),
            "E315",
        ),
        (gzip.compress(build.pftrace(small())), Limits(inflated_bytes=100), "E310"),
        (build.pftrace(small()), Limits(events=3), "E313"),
        (build.names([f"n{n}" for n in range(50)]), Limits(distinct=10), "E314"),
    ],
    ids=["long packet", "ratio", "long compressed packet", "size", "events", "names"],
)
def test_limits_are_those_of_the_json(data: bytes, limits: Limits, code: str) -> None:
    with pytest.raises(InputError) as caught:
        read_bytes(data, limits=limits)
    assert caught.value.code == code
