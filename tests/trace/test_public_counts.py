"""Public traces through the reader, held against a plain walk through their JSON."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.trace import Kind, load

FILES = sorted((Path(__file__).parents[2] / "traces" / "public").glob("*.json.gz"))
DEVICE = {"kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}
RUNTIME = {"cuda_runtime", "cuda_driver", "Runtime"}
Json = dict[str, Any]


def intervals(file: Path) -> list[Json]:
    """Every event of the file with an interval, Python frames aside."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and e.get("cat") != "python_function"]


def number(event: Json, field: str) -> int:
    value = event.get("args", {}).get(field, -1)
    return int(value) if value is not None else -1


@pytest.fixture(scope="module", params=FILES, ids=lambda file: file.name)
def walked(request: pytest.FixtureRequest) -> tuple[Path, list[Json]]:
    """A file, with what a plain walk finds in it."""
    return request.param, intervals(request.param)


def test_columns_hold_what_the_file_says(walked: tuple[Path, list[Json]]) -> None:
    file, events = walked
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


def test_device_work_without_a_launch_is_counted(walked: tuple[Path, list[Json]]) -> None:
    file, events = walked
    launched = {number(e, "correlation") for e in events if e.get("cat") in RUNTIME} - {-1}
    lost = [
        e for e in events if e.get("cat") in DEVICE and number(e, "correlation") not in launched
    ]
    result = analyse([file])
    assert result.health.get("kernels_without_launch", 0) == len(lost)
    if file.name.startswith("mi300x-resnet-checkpointed"):
        assert Counter(e["cat"] for e in lost)["kernel"] == 757
