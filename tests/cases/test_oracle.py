"""The truth itself: what the models counted is what the design's nesting table says.

Nothing here reads a trace, except to see that it holds the steps that the truth speaks of.
"""

import gzip
from pathlib import Path

import msgspec
import pytest

from .case import STEPS, Case
from .nesting import CASES, LOOKALIKES
from .recorded import recorded
from .truth import read_truth, write_truth

ONE, TWO, NONE = (1.0, 1.0), (2.0, 2.0), (0.0, 0.0)

# Recomputes per forward and backward of each layer's (attention, MLP).
MULTIPLICITY = {
    # The design's nesting table.
    "no_checkpoint": [NONE] * 4,
    "r_inside": [ONE] * 4,
    "n_inside": [ONE] * 4,
    "r_outside": [ONE] * 4,
    "n_outside": [ONE] * 4,
    "n_outside_no_early_stop": [ONE] * 4,
    "r_in_r": [TWO] * 4,
    "n_in_r": [TWO] * 4,
    "r_in_n": [TWO] * 4,
    "n_in_n": [ONE] * 4,
    "n_in_n_no_early_stop": [TWO] * 4,
    "n_halves_in_n": [(2.0, 1.0)] * 4,
    "n_first_half_in_n": [(2.0, 1.0)] * 4,
    "n_layers_in_n_stack": [TWO, TWO, TWO, ONE],
    # FSDP's wrapper is a non-reentrant checkpoint like any other.
    "r_in_wrapper": [TWO] * 4,
    "n_in_wrapper": [ONE] * 4,
    # Levels add up where a reentrant checkpoint takes part.
    "r_halves_in_r": [TWO] * 4,
    "r_three_levels": [(3.0, 3.0)] * 4,
    "r_layers_in_r_stack": [TWO] * 4,
    "n_layers_in_r_stack": [TWO] * 4,
    "r_layers_in_n_stack": [TWO] * 4,
    # Norm and head save tensors after the last layer, so its recompute is not cut short.
    "n_layers_in_n_stack_with_head": [TWO] * 4,
    # Part of the model. The last segment of checkpoint_sequential is not checkpointed.
    "n_halves": [ONE] * 4,
    "n_stack": [ONE] * 4,
    "two_layers_of_four": [NONE, ONE, ONE, NONE],
    "one_layer_doubled": [ONE, ONE, TWO, ONE],
    "first_half_only": [(1.0, 0.0)] * 4,
    "selective_matmuls": [ONE] * 4,
    "r_sequential": [ONE, ONE, NONE, NONE],
    "n_sequential": [ONE, ONE, NONE, NONE],
    "r_layers_in_r_sequential": [TWO, TWO, ONE, ONE],
    "n_layers_in_n_sequential": [TWO, ONE, ONE, ONE],
    # Other shapes of the step.
    "accumulation_once": [ONE] * 4,
    "accumulation_doubled": [TWO] * 4,
    "autocast_once": [ONE] * 4,
    "autocast_doubled": [TWO] * 4,
    "evaluation_between_steps": [ONE] * 4,
    "no_schedule_doubled": [TWO] * 4,
    "no_schedule_none": [NONE] * 4,
    "no_optimizer_doubled": [TWO] * 4,
    "closure_doubled": [TWO] * 4,
    "closure_none": [NONE] * 4,
    "two_losses_n": [ONE] * 4,
    "two_losses_r": [ONE] * 4,
    "frozen_teacher_once": [NONE] * 4 + [ONE] * 4,
}


def test_every_case_stands_in_the_table_or_is_a_lookalike() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) == set(MULTIPLICITY) | {case.name for case in LOOKALIKES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recomputes_are_what_the_nesting_table_says_and_so_is_the_verdict(case: Case) -> None:
    trace, truth = recorded(case.name)
    if case in LOOKALIKES:
        assert truth.layers
        assert all(x.attention.recomputes == x.mlp.recomputes == 0 for x in truth.layers)
    else:
        assert list(truth.multiplicity()) == MULTIPLICITY[case.name]
    assert not truth.kept or case.name == "selective_matmuls"
    trained = zip(truth.layers, truth.multiplicity(), strict=True)
    parts = [m for layer, both in trained if layer.attention.forward for m in both]
    if max(parts) >= 2:
        counted = "doubled"
    elif max(parts) == 0:
        counted = "none"
    else:
        counted = "partial" if min(parts) == 0 or truth.kept else "full"
    assert truth.verdict in (counted, None)
    # The trace holds the steps of the truth.
    events = msgspec.json.decode(gzip.decompress(trace.read_bytes()))["traceEvents"]
    marked = [e for e in events if e.get("ph") == "X" and e["name"].startswith("ProfilerStep#")]
    assert truth.steps == STEPS
    assert len(marked) == (STEPS if case.scheduled else 0)
    assert not any(e.get("cat") == "python_function" for e in events)


@pytest.mark.parametrize(
    ("name", "forward", "recomputes", "evaluation"),
    [
        ("accumulation_none", 2, 0, 0),
        ("accumulation_once", 2, 2, 0),
        ("accumulation_doubled", 2, 4, 0),
        ("evaluation_none", 1, 0, 1),
        ("evaluation_between_steps", 1, 1, 1),
        ("two_losses_none", 1, 0, 0),
        ("two_losses_n", 1, 2, 0),
    ],
)
def test_counts_per_step(name: str, forward: int, recomputes: int, evaluation: int) -> None:
    _, truth = recorded(name)
    for layer in truth.layers:
        for runs in (layer.attention, layer.mlp):
            counted = (runs.forward, runs.recomputes, runs.evaluation)
            assert counted == (forward, recomputes, evaluation)


def test_selective_checkpointing_keeps_matrix_products() -> None:
    _, truth = recorded("selective_matmuls")
    # Four linear layers in each of four blocks.
    assert truth.kept == {"aten.addmm.default": 16}


def test_a_truth_is_read_back_as_written(tmp_path: Path) -> None:
    _, truth = recorded("selective_matmuls")
    write_truth(tmp_path / "x.truth.json", truth)
    assert read_truth(tmp_path / "x.truth.json") == truth
