"""Traces that look like something else: one case for each trap, held against its own truth."""

from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from tests.cases.bystanders import BYSTANDERS
from tests.cases.case import Case, record
from tests.cases.compiled import COMPILED
from tests.cases.discarded import DISCARDED
from tests.cases.distributed import DISTRIBUTED, record_ranks
from tests.cases.groups import highest
from tests.cases.hooks import HOOKS
from tests.cases.places import PLACES
from tests.cases.stacks import STACKS
from tests.cases.truth import Truth
from tests.effort import some

TRAPS = {
    "ema_once": "the teacher's layers look like blocks that were not recomputed",
    "reference_r": "checkpoint functions whose backward never comes",
    "optimizer_in_backward_no_schedule": "no optimizer step ends a training step",
    "two_optimizers_no_schedule": "two optimizer steps end one training step",
    "hook_output_grad": "a hook on an output runs a layer with gradients on",
    "hook_parameter_grad_same": "a hook on a parameter does, and the layer is its own",
    "hook_module_grad": "a module's hook does",
    "hook_output_grad_same_once": "a hook does, beside a checkpoint",
    "discarded_mlp_some": "a hook does, and it is a recompute: Megatron-core's",
    "offload_saved_in_n": "a checkpoint that keeps nothing recomputes nothing",
    "offload_saved_round_r": "a checkpoint's inputs are unpacked before its recompute",
    "linear_n": "early stop leaves nothing of the recompute",
    "linear_r": "regions of one operator",
    "shared_some": "one layer used four times",
    "fsdp1_r_in_wrapper_n": "the reported pair under FSDP",
    "fsdp2_wrapper_outside": "a recompute gathers its parameters again",
    "ddp_r_in_wrapper_n": "the reported pair under DDP",
    "compiled_layers_r_in_n": "first run and recompute are two versions of compiled code",
    "compiled_layers_n_in_r": "the same, the other way about",
}
CASES = {
    case.name: case
    for case in (*BYSTANDERS, *HOOKS, *PLACES, *STACKS, *DISCARDED, *DISTRIBUTED, *COMPILED)
}

# What a compiler recomputes in a whole model, and in a graph per layer.
ONE_OF_EACH = ("compiled_model_r_in_n", "compiled_layers_n_inside", "compiled_layers_n_inside_n")


def check(trace: Path, truth: Truth) -> None:
    result = analyse([trace])
    assert truth.verdict in (None, result.verdict)
    assert result.recompute_per_backward == highest(truth)


pytestmark = pytest.mark.usefixtures("alone_again")


@pytest.mark.parametrize("name", some(TRAPS, 2))
def test_the_answer_is_the_truth(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    check(trace, record(CASES[name], trace))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in ONE_OF_EACH else pytest.mark.slow)
        for case in COMPILED
        if case.verdict is None
    ],
    ids=lambda case: case.name,
)
def test_what_a_compiler_recomputes_is_not_guessed(case: Case, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    truth = record(case, trace)
    assert truth.layers
    result = analyse([trace])
    assert (result.verdict, result.recompute_per_backward) == ("inconclusive", None)
    assert "compiled" in (result.reason or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp1_r_in_wrapper_n", "ddp_wrapper_n"])
def test_every_rank_gives_the_truth(name: str, tmp_path: Path) -> None:
    ranks = record_ranks(name, tmp_path)
    assert len(ranks) == 2
    for trace, truth in ranks:
        check(trace, truth)
