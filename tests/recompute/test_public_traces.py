"""Real traces that others published, of torch 1.8 to 2.x, NVIDIA and AMD."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.result import Result
from recompute_scan.trace import Kind, load

FOLDER = Path(__file__).parents[2] / "traces" / "public"
CHECKPOINTED = FOLDER / "mi300x-resnet-checkpointed.json.gz"


def test_both_ranks_of_one_run() -> None:
    names = [f"v100-megatron-tp2-rank{rank}.json.gz" for rank in (0, 1)]
    result = analyse([FOLDER / name for name in names])
    assert [(rank.rank, rank.trace, rank.verdict) for rank in result.ranks] == [
        (0, names[0], "none"),
        (1, names[1], "none"),
    ]
    assert result.warnings == ()


@pytest.fixture(scope="module")
def checkpointed() -> RecomputeFacts:
    return study(load(CHECKPOINTED))


def summary(result: Result) -> dict[str, Any]:
    """The counts of a result, without times."""
    return {
        "verdict": result.verdict,
        "highest": result.recompute_per_backward,
        "mean": result.mean_recompute,
        "regions": [(r.signature, r.recompute_runs_per_backward) for r in result.regions],
        "families": [
            (f.family, f.forward_per_step, f.recomputed_per_step) for f in result.families
        ],
        "steps": [(s.index, s.forward_ops, s.recomputed_ops) for s in result.steps],
    }


def test_four_stages_a_step_are_checkpointed() -> None:
    result = analyse([CHECKPOINTED])
    assert len(result.steps) == 3
    assert [region.recompute_runs_per_backward for region in result.regions] == [1.0] * 4
    assert [region.forward_runs_per_step for region in result.regions] == [1.0] * 4
    assert [[c.variant for c in region.checkpoints] for region in result.regions] == [
        ["non-reentrant"]
    ] * 4


def test_57_convolutions_and_batch_norms_run_again(checkpointed: RecomputeFacts) -> None:
    calls = checkpointed.calls
    again = np.concatenate(
        [recompute.again[recompute.ran] for recompute in checkpointed.alignment.recomputes]
    )
    names = [calls.names[calls.name[row]] for row in again]
    assert names.count("aten::conv2d") == 57
    assert names.count("aten::batch_norm") == 57
    forward = [calls.names[calls.name[row]] for row in checkpointed.alignment.forward]
    assert forward.count("aten::conv2d") == forward.count("aten::batch_norm") == 60


def of_recomputes(facts: RecomputeFacts) -> tuple[np.ndarray, np.ndarray]:
    """The outermost operator that launched each kernel, -1 without one; which a recompute ran."""
    again = np.concatenate([recompute.again for recompute in facts.alignment.recomputes])
    launch = facts.kernels.launch
    top = np.where(launch >= 0, facts.structure.top[launch], -1)
    return top, np.isin(top, again)


def test_kernels_of_the_recomputes(checkpointed: RecomputeFacts) -> None:
    """Linked by correlation: the GPU runs 38 ms behind its host here, so times would mislead."""
    kernels, trace = checkpointed.kernels, checkpointed.trace
    _, mine = of_recomputes(checkpointed)
    assert int(mine.sum()) == 615
    assert float((kernels.end - kernels.start)[mine].sum()) / 1000 == pytest.approx(4210.0, abs=0.5)
    lost = kernels.event[kernels.launch < 0]
    assert int((trace.kind[lost] == Kind.KERNEL).sum()) == 757
    assert int((trace.kind[kernels.event] == Kind.KERNEL).sum()) == 2995


def test_arrows_miss_what_the_recomputes_fill(checkpointed: RecomputeFacts) -> None:
    """By ``ac2g`` arrows 24 activities less: no arrow leads to what ``hipMemsetAsync`` fills."""
    written = json.loads(gzip.decompress(CHECKPOINTED.read_bytes()))["traceEvents"]
    arrows = [event for event in written if event.get("cat") == "ac2g"]
    ends = [{e["id"] for e in arrows if e["ph"] == ph} for ph in "sf"]
    joined = np.array(sorted(ends[0] & ends[1]))
    calls, kernels, trace = checkpointed.calls, checkpointed.kernels, checkpointed.trace
    top, mine = of_recomputes(checkpointed)
    reached = mine & np.isin(trace.correlation[kernels.event], joined)
    times = kernels.end - kernels.start
    assert int(reached.sum()) == 591
    assert float(times[reached].sum()) / 1000 == pytest.approx(4122.2, abs=0.05)
    missed = np.flatnonzero(mine & ~reached)
    assert len(missed) == 24
    assert float(times[missed].sum()) / 1000 == pytest.approx(87.7, abs=0.05)
    launches = {calls.names[calls.name[row]] for row in kernels.launch[missed]}
    operators = {calls.names[calls.name[row]] for row in top[missed]}
    assert (launches, operators) == ({"hipMemsetAsync"}, {"aten::conv2d"})


def test_the_stages_are_named_after_their_modules() -> None:
    regions = analyse([CHECKPOINTED]).regions
    assert [region.module_class for region in regions] == ["Sequential"] * 4
    # Sequential_2, _4 and _6 are the shortcuts inside them.
    assert [region.module for region in regions] == [f"Sequential_{i}" for i in (0, 1, 3, 5)]


def test_the_answer_needs_no_python_stacks(tmp_path: Path) -> None:
    written = json.loads(gzip.decompress(CHECKPOINTED.read_bytes()))
    events = written["traceEvents"]
    written["traceEvents"] = [e for e in events if e.get("cat") != "python_function"]
    assert 0 < len(written["traceEvents"]) < len(events)
    without = tmp_path / "without-stacks.json"
    without.write_text(json.dumps(written))
    assert summary(analyse([without])) == summary(analyse([CHECKPOINTED]))


def test_times_since_1970_in_whole_microseconds_nest_exactly() -> None:
    for version in ("1.8", "1.9"):
        facts = study(load(FOLDER / f"v100-resnet50-torch{version}.json.gz"))
        assert facts.calls.overruns == 0
