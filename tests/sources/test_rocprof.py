"""rocprofv3's JSON: kernels and the threads that asked for them, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import InputError
from recompute_scan.trace import Kind, load
from recompute_scan.trace.limits import Limits
from tests.sources.rocprof_builder import Event, rocprof

HOST, AUTOGRAD = 908, 1229
FORWARD, BACKWARD = "attn_fwd", "bwd_kernel_fuse"


def recorded(order: str) -> bytes:
    """Kernels in order: ``F`` from the host's thread, ``R`` and ``B`` from autograd's."""
    events: list[Event] = []
    for number, letter in enumerate(order):
        tied = {"correlation": number + 1}
        thread = HOST if letter == "F" else AUTOGRAD
        name = BACKWARD if letter == "B" else FORWARD
        events.append({"cat": "cuda_runtime", "tid": thread, "args": tied})
        events.append({"cat": "kernel", "name": name, "tid": 18, "ts": 10.0 * number,
                       "dur": 8.0, "args": tied})  # fmt: skip
    return rocprof({"traceEvents": events})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "908_results.json"


@pytest.mark.parametrize(
    ("step", "verdict", "runs"),
    [
        ("FFFFBBBB", "none", 0),
        ("FFFFRBRBRBRB", "full", 1),
        ("FFFFRRRRBBBB", "full", 1),
        ("FFFFRRBRRBRRBRRB", "doubled", 2),
        ("FFFF", "inconclusive", None),
    ],
)
def test_threads_tell_the_passes(path: Path, step: str, verdict: str, runs: int | None) -> None:
    path.write_bytes(recorded(3 * step))
    result = analyse([path])
    assert (result.verdict, result.recompute_per_backward) == (verdict, runs)
    assert result.environment["profiler"] == "rocprofv3"
    assert result.environment["gpu"] == "1 x AMD Instinct MI350X"


def test_a_launch_for_each_kernel(path: Path) -> None:
    path.with_suffix(".json.gz").write_bytes(gzip.compress(recorded("FRB")))
    trace = load(path.with_suffix(".json.gz"))
    assert trace.kind.tolist() == [Kind.RUNTIME] * 3 + [Kind.KERNEL] * 3
    assert trace.ts.tolist() == [0, 10_000, 20_000] * 2
    assert trace.dur.tolist() == [0] * 3 + [8_000] * 3
    assert trace.correlation.tolist() == [0, 1, 2] * 2
    threads = [trace.threads[code] for code in trace.thread]
    assert (
        threads == [("908", "908"), ("908", "1229"), ("908", "1229")] + [("37946", "stream 18")] * 3
    )
    assert [trace.names[code] for code in trace.name[3:]] == [FORWARD, FORWARD, BACKWARD]


def test_of_several_processes_the_one_with_most_kernels_is_read(path: Path) -> None:
    both = json.loads(recorded("FB"))
    both["rocprofiler-sdk-tool"] += json.loads(recorded("FFBB"))["rocprofiler-sdk-tool"]
    path.write_text(json.dumps(both))
    trace = load(path)
    assert len(trace) == 2 * 4
    assert trace.health == {"events_of_other_processes": 2}


def test_a_kernel_without_a_name_is_counted(path: Path) -> None:
    document = json.loads(recorded("FB"))
    del document["rocprofiler-sdk-tool"][0]["kernel_symbols"][1]
    path.write_text(json.dumps(document))
    assert load(path).health == {"events_without_name": 1}


@pytest.mark.parametrize(
    ("data", "limits", "code"),
    [
        (b'{"rocprofiler-sdk-tool":[]}', Limits(), "E304"),
        (recorded(""), Limits(), "E304"),
        (recorded("FB")[:-20], Limits(), "E302"),
        (b'{"rocprofiler-sdk-tool":[{"buffer_records":{"kernel_dispatch":[{}]}}]}', Limits(),
         "E302"),
        (b'{"rocprofiler-sdk-tool":' + b"[" * 100_000, Limits(), "E302"),
        (recorded("FFBB"), Limits(events=7), "E313"),
        (recorded("FFBB"), Limits(distinct=2), "E314"),
        (recorded("FB").replace(b'"start_timestamp":0', b'"start_timestamp":1e300'), Limits(),
         "E302"),
        (recorded("FB").replace(b'"start_timestamp":0', b'"start_timestamp":9' + b"9" * 30),
         Limits(), "E302"),
    ],
)  # fmt: skip
def test_what_is_refused(path: Path, data: bytes, limits: Limits, code: str) -> None:
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        load(path, limits=limits)
    assert caught.value.code == code


def test_wherever_it_is_cut_it_is_one_of_our_errors(path: Path) -> None:
    data = recorded("FRB")
    for end in range(40, len(data) - 1, 97):
        path.write_bytes(data[:end])
        with pytest.raises(InputError):
            load(path)
