"""Traces that other versions of torch wrote: the answer is what the model counted there."""

import json
from pathlib import Path
from typing import Any

import pytest

from recompute_scan import trace
from recompute_scan.analysis.pipeline import result_of
from tests.cases.groups import highest
from tests.cases.truth import truth_of

FOLDER = Path(__file__).parents[2] / "traces" / "versions"


def _documents() -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for path in sorted(FOLDER.glob("*/truth.json")):
        truths = json.loads(path.read_text(encoding="utf-8"))["truths"]
        found += [(path.parent.name, name, truth) for name, truth in truths.items()]
    return found


DOCUMENTS = _documents()


def test_every_trace_has_its_truth() -> None:
    named = {FOLDER / version / f"{name}.json.gz" for version, name, _ in DOCUMENTS}
    assert named == set(FOLDER.glob("*/*.json.gz"))
    assert {version.rpartition(".")[0] for version, _, _ in DOCUMENTS} >= {
        "2.1",
        "2.2",
        "2.3",
        "2.14",
    }


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 2_000_000


@pytest.mark.parametrize(
    ("version", "name", "document"), DOCUMENTS, ids=[f"{v}-{n}" for v, n, _ in DOCUMENTS]
)
def test_the_answer_is_what_ran(version: str, name: str, document: dict[str, Any]) -> None:
    truth = truth_of(document)
    result = result_of(trace.load(FOLDER / version / f"{name}.json.gz"))
    assert result.verdict == truth.verdict
    assert result.recompute_per_backward == highest(truth)
