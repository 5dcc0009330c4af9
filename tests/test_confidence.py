"""Calls that cross others in time take the confidence away, and are told."""

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from recompute_scan.analysis.headline import headline
from recompute_scan.recompute.boundaries import Annotations
from recompute_scan.recompute.checks import confidence, doubts
from recompute_scan.recompute.study import RecomputeFacts, study
from tests.report.sample_results import doubled, full
from tests.trace.kineto_reading import parse

TRACE = Path(__file__).parents[1] / "traces" / "plain_once" / "trace-rank0.json.gz"


def lengthened(share: float) -> RecomputeFacts:
    """A sound trace, so many of whose operators last too long."""
    chance = Random(0)
    document: dict[str, Any] = json.loads(gzip.decompress(TRACE.read_bytes()))
    for event in document["traceEvents"]:
        if event.get("cat") == "cpu_op" and chance.random() < share:
            event["dur"] = chance.uniform(0, 1000)
    return study(parse(json.dumps(document).encode(), "trace.json"))


@pytest.mark.parametrize(("share", "level"), [(0.0, "high"), (0.005, "medium"), (0.02, "low")])
def test_calls_that_cross_others(share: float, level: str) -> None:
    facts = lengthened(share)
    said = [sentence for sentence in doubts(facts) if "end after the call" in sentence]
    assert bool(said) is bool(facts.calls.overruns) is (share > 0)
    assert confidence(facts) == level


@pytest.mark.parametrize(("disagreeing", "level"), [(0, "high"), (20, "medium"), (65, "low")])
def test_annotations_that_disagree(disagreeing: int, level: str) -> None:
    """More than the operators that were recomputed: annotations and answer are strangers."""
    facts = lengthened(0)
    annotations = Annotations(calls=(), disagreeing=disagreeing, recomputed=64)
    assert confidence(replace(facts, annotations=annotations)) == level


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.96, "Every checkpoint"), (None, "Every checkpoint"), (0.28, "28 % of the forward work")],
)
def test_a_few_blocks_are_not_called_every_one(share: float | None, said: str) -> None:
    assert said in headline(replace(full(), recomputed_share=share))


def test_a_part_that_several_passes_run_again_is_once_in_each() -> None:
    several = tuple(replace(one, backward_passes=2.0) for one in full().regions)
    result = replace(full(), verdict="partial", recomputed_share=0.41, regions=several)
    assert headline(result).endswith("runs once more in each of up to 2 backward passes.")


@pytest.mark.parametrize(("mean", "said"), [(1.8, "every block runs"), (1.1, "some code runs")])
def test_a_checkpoint_around_more_than_the_doubled_blocks(mean: float, said: str) -> None:
    result = replace(doubled(), mean_recompute=mean, recomputed_share=0.9)
    assert said in headline(result)
