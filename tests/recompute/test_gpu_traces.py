"""Traces recorded on GPUs: the answer is what the model counted while it was recorded."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan import trace
from recompute_scan.analysis.pipeline import result_of
from recompute_scan.result import Result
from tests.cases.coarse import without_operators
from tests.cases.groups import highest
from tests.cases.truth import Truth, truth_of

FOLDER = Path(__file__).parents[2] / "traces" / "gpu"
DOCUMENTS: dict[Path, dict[str, Any]] = {
    path.with_name(f"{name}.json.gz"): document
    for path in sorted(FOLDER.glob("*/truth.json"))
    for name, document in json.loads(path.read_text(encoding="utf-8"))["truths"].items()
}
NAMES = [f"{path.parent.name}-{path.name.removesuffix('.json.gz')}" for path in DOCUMENTS]


def _is_right(result: Result, truth: Truth) -> bool:
    if truth.name.startswith("compiled") and result.verdict == "inconclusive":
        return "compiled" in (
            result.reason or ""
        )  # a trace doesn't show what a compiler runs again
    return (result.verdict, result.recompute_per_backward) == (truth.verdict, highest(truth))


def test_every_trace_has_its_truth() -> None:
    folders = {path.parent for path in DOCUMENTS}
    assert set(DOCUMENTS) == {path for folder in folders for path in folder.glob("*.json.gz")}
    assert {truth["verdict"] for truth in DOCUMENTS.values()} == {
        "none",
        "partial",
        "full",
        "doubled",
    }


def test_they_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.rglob("*.json.gz")]
    assert max(sizes) < 1_500_000
    assert sum(sizes) < 20_000_000


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_the_answer_is_what_ran(path: Path) -> None:
    result = result_of(trace.load(path))
    assert _is_right(result, truth_of(DOCUMENTS[path]))


def test_lanes_show_when_kernels_ran() -> None:
    path = FOLDER / "h100" / "llama-flash-twice.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    begins = np.array(sorted(e["ts"] for e in on_device))
    ends = np.array(sorted(e["ts"] + e["dur"] for e in on_device))
    proof = result_of(trace.load(path)).proof
    assert proof is not None
    busy = [op for lane in proof.lanes for op in lane.ops if op.duration_us]
    assert len(busy) > 100
    assert all(np.abs(begins - op.start_us).min() < 0.01 for op in busy)
    assert all(np.abs(ends - op.start_us - op.duration_us).min() < 0.01 for op in busy)


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_kernels_alone_give_the_same_or_no_answer(path: Path, tmp_path: Path) -> None:
    alone = without_operators(path, tmp_path / path.name)
    result = result_of(trace.load(alone))
    assert result.verdict == "inconclusive" or _is_right(result, truth_of(DOCUMENTS[path]))
