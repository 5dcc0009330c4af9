"""Traces recorded on GPUs: the answer is what the model counted while it was recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from recompute_scan import trace
from recompute_scan.analysis.answer import result_of
from recompute_scan.result import Result
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
    assert set(DOCUMENTS) == set(FOLDER.glob("*/*.json.gz"))
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_kernels_alone_give_the_same_or_no_answer(path: Path, tmp_path: Path) -> None:
    document = json.loads(gzip.decompress(path.read_bytes()))
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "cpu_op"]
    alone = tmp_path / "trace.json"
    alone.write_text(json.dumps(document), encoding="utf-8")
    result = result_of(trace.load(alone))
    assert result.verdict == "inconclusive" or _is_right(result, truth_of(DOCUMENTS[path]))
