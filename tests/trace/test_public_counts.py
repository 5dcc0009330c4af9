"""Public traces through the reader, held against a plain walk through their JSON."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.recompute.attention_kernels import attention_role
from recompute_scan.trace import Kind, load

FOLDER = Path(__file__).parents[2] / "traces" / "public"
FILES = sorted(FOLDER.glob("*.json.gz"))
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
DEVICE = {"kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}
RUNTIME = {"cuda_runtime", "cuda_driver", "Runtime"}
Json = dict[str, Any]
# Counted by hand with grep; no other public trace has an attention kernel.
ATTENTION = {
    "h100-nanogpt-compiled": {
        ("flash_attention_3", "forward"): 50,
        ("flash_attention_3", "backward"): 57,
    },
    "h100-qwen-inference": {("flash_attention_2", "forward"): 34},
    "a100-segment-anything-inference": {
        ("efficient_attention", "forward"): 28,
        ("flash_attention_2", "forward"): 7,
    },
}


def intervals(file: Path) -> list[Json]:
    """Every event of the file with an interval, Python frames aside."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and e.get("cat") != "python_function"]


def number(event: Json, field: str) -> int:
    value = event.get("args", {}).get(field, -1)
    return int(value) if value is not None else -1


def test_every_trace_has_an_expectation() -> None:
    assert {file.name for file in FILES} == set(EXPECTED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_columns_and_answer_hold_what_the_file_says(file: Path) -> None:
    events = intervals(file)
    trace = load(file)
    assert [trace.names[code] for code in trace.name] == [str(e["name"]) for e in events]
    assert [trace.threads[code] for code in trace.thread] == [
        (str(e["pid"]), str(e["tid"])) for e in events
    ]
    assert trace.sequence.tolist() == [number(e, "Sequence number") for e in events]
    assert trace.correlation.tolist() == [number(e, "correlation") for e in events]
    kinds = Counter(e.get("cat") for e in events)
    assert int((trace.kind == Kind.RUNTIME).sum()) == sum(kinds[cat] for cat in RUNTIME)
    assert int(np.isin(trace.kind, (Kind.KERNEL, Kind.COPY)).sum()) == sum(
        kinds[cat] for cat in DEVICE
    )
    assert trace.health == {}

    launched = {number(e, "correlation") for e in events if e.get("cat") in RUNTIME} - {-1}
    lost = [
        e for e in events if e.get("cat") in DEVICE and number(e, "correlation") not in launched
    ]
    result = analyse([file])
    assert result.health.get("kernels_without_launch", 0) == len(lost)
    if file.name.startswith("mi300x-resnet-checkpointed"):
        assert Counter(e["cat"] for e in lost)["kernel"] == 757
    kernels = [str(e["name"]) for e in events if str(e.get("cat")).lower() == "kernel"]
    found = Counter(role for name in kernels if (role := attention_role(name)))
    assert found == ATTENTION.get(file.name.removesuffix(".json.gz"), {})
    expected = EXPECTED[file.name]
    assert result.verdict == expected["verdict"]
    assert result.recompute_per_backward == expected["recompute_per_backward"]
    assert "error" not in {checked.status for checked in result.checked}
