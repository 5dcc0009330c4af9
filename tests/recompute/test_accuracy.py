"""The program's answer on every recorded case, held against what the model itself counted.

The traces come from plain ``torch.profiler``: no wrapper, no annotations, no stacks.
"""

import functools
from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.result import Result
from tests.cases.case import Case
from tests.cases.coarse import write_coarse
from tests.cases.nesting import CASES
from tests.cases.recorded import recorded
from tests.cases.truth import Truth

# Cases whose regions are no layers: recomputes of each region, and why.
OTHER_REGIONS = {
    "n_halves": ([1.0] * 8, "each half of a layer is a checkpoint of its own"),
    "n_stack": ([1.0], "one checkpoint around all layers; nothing shows where one of them ends"),
    "n_sequential": ([1.0, 0.0], "one checkpoint around two layers, and the like without one"),
    "r_sequential": ([1.0, 0.0], "the same"),
}
# Its regions are neither layers nor wrong: the two models' layers look alike, and runs of them
# that follow each other fold into one another.
FOLDED = "adversarial"

N, R = "non-reentrant", "reentrant"
VARIANTS = {
    "no_checkpoint": (),
    "r_inside": (R,),
    "n_inside": (N,),
    "r_outside": (R,),
    "n_outside": (N,),
    "r_in_r": (R, R),
    "n_in_r": (R, N),
    "r_in_n": (N, R),
    # Early stop ends the outer recompute before the inner work: the operators show one alone.
    "n_in_n": (N,),
    "n_in_n_no_early_stop": (N, N),
}


@functools.cache
def answer(name: str) -> Result:
    return analyse([recorded(name)[0]])


def of_layers(truth: Truth) -> list[float]:
    """Recomputes of each layer that ran in training, the more recomputed half of it."""
    both = zip(truth.layers, truth.multiplicity(), strict=True)
    return [max(parts) for layer, parts in both if layer.attention.forward or layer.mlp.forward]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_answer_is_the_truth_and_sure(case: Case) -> None:
    result, (_, truth) = answer(case.name), recorded(case.name)
    assert result.verdict == truth.verdict
    assert result.recompute_per_backward == max(of_layers(truth))
    assert (result.confidence, result.evidence_level) == ("high", "autograd")
    assert result.warnings == ()
    assert "error" not in {checked.status for checked in result.checked}
    # Each layer has its own count, and runs forward once per micro-batch.
    counted = [region.recompute_runs_per_backward for region in result.regions]
    if case.name == FOLDED:
        assert set(counted) == {0.0} == set(of_layers(truth))
    else:
        assert counted == OTHER_REGIONS.get(case.name, (of_layers(truth),))[0]
        assert {one.forward_runs_per_step for one in result.regions} == {case.micro_batches}
    # Steps are complete and alike.
    assert len(result.steps) == truth.steps
    assert all(step.complete for step in result.steps)
    assert {step.micro_batches for step in result.steps} == {case.micro_batches}
    assert len({step.forward_ops for step in result.steps}) == 1
    # An operator that a busy machine held up in its first run can look cut short in a recompute.
    most = max(step.recomputed_ops for step in result.steps)
    assert min(step.recomputed_ops for step in result.steps) >= 0.9 * most


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if number % 9 else ())
        for number, case in enumerate(CASES)
        if number % 3 == 0
    ],
    ids=lambda case: case.name,
)
def test_whole_microseconds_give_the_same_answer(case: Case, tmp_path: Path) -> None:
    fine, trace = answer(case.name), recorded(case.name)[0]
    cut = analyse([write_coarse(trace, tmp_path / trace.name)])
    assert cut.verdict == fine.verdict
    assert cut.recompute_per_backward == fine.recompute_per_backward
    assert [r.recompute_runs_per_backward for r in cut.regions] == [
        r.recompute_runs_per_backward for r in fine.regions
    ]
    assert [c.variant for r in cut.regions for c in r.checkpoints] == [
        c.variant for r in fine.regions for c in r.checkpoints
    ]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_nesting_table_is_read_off_the_operators(name: str) -> None:
    for region in answer(name).regions:
        assert tuple(c.variant for c in region.checkpoints) == VARIANTS[name]
        assert [c.depth for c in region.checkpoints] == list(range(len(VARIANTS[name])))


@pytest.mark.parametrize(
    ("name", "runs"), [("r_in_wrapper", 2), ("n_in_wrapper", 1), ("no_checkpoint", 0)]
)
def test_attention_is_counted_per_layer_and_step(name: str, runs: int) -> None:
    attention = answer(name).attention
    assert attention is not None
    assert attention.forward_per_step == 4
    assert attention.recomputed_per_step == 4 * runs
    assert attention.backward_per_step == 4


def test_selective_checkpointing_recomputes_no_matrix_product() -> None:
    result = answer("selective_matmuls")
    families = {family.family: family for family in result.families}
    assert families["gemm"].recomputed_per_step == 0
    assert families["norm"].recomputed_per_step == 8
    assert result.cross_check is not None
    products = [
        row for row in result.cross_check.counts if row.name in ("aten::addmm", "aten::linear")
    ]
    # The policy's mode records each operator in itself once more; an entered one is kept, not run.
    assert {row.outside for row in products} == {3 * 17}
    assert result.cross_check.counts[-len(products) :] == tuple(products)


@pytest.mark.parametrize("name", ["builtin_mlp", "builtin_chunked_loss", "gradient_penalty"])
def test_recompute_inside_a_formula_is_not_counted(name: str) -> None:
    result = answer(name)
    assert result.mean_recompute == 0.0
    assert all(family.recomputed_per_step == 0 for family in result.families)
