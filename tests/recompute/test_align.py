"""Recomputes are found by matching the forward pass, and nothing else is taken for one."""

import pytest

from tests.recompute.training import (
    SHAPE,
    gradients,
    recompute_counts,
    reentrant,
    reentrant_backward,
    run,
    study_step,
)
from tests.trace_builder import Call, annotation, launch, node, op


def test_a_function_that_only_the_recompute_calls_is_found() -> None:
    # fairscale's stands aside where gradients are off, as in an outer checkpoint's first run.
    inner = reentrant(60, run(50))
    nested = reentrant_backward(60, run(70))
    layers = [reentrant(5, run(0)), reentrant(6, run(0))]
    backward = [
        node("CheckpointFunctionBackward", op("aten::detach_", seq=60), inner, nested, seq=number)
        for number in (6, 5)
    ]
    assert recompute_counts(study_step(*layers, *backward)) == [2] * 8


def test_a_node_from_before_the_trace_repeats_nothing_in_it() -> None:
    # Another optimizer's step ended the one in which a generator ran.
    forward, earlier = run(20), run(5)
    backward = [
        *gradients(forward, recompute=run(60)),
        *gradients(earlier, recompute=run(80)),
    ]
    assert recompute_counts(study_step(*forward, *backward)) == [1] * len(forward)


def test_on_a_gpu_an_operator_that_launched_nothing_did_not_run() -> None:
    def layer(first: int, kernels: int) -> list[Call]:
        return [
            op("aten::linear", *([launch(f"gemm{i}")] if i < kernels else []), seq=first + i)
            for i in range(4)
        ]

    forward = layer(0, kernels=4)
    facts = study_step(*forward, *gradients(forward, recompute=layer(50, kernels=3)))
    assert facts.work.on_gpu
    assert recompute_counts(facts) == [1, 1, 1, 0]


@pytest.mark.parametrize("mode_range", [True, False])
def test_selective_checkpointing_returns_saved_results_without_running_them(
    mode_range: bool,
) -> None:
    """A dispatch mode's operator stands in another of its name, unless its result was saved."""

    def dispatched(name: str, seq: int, runs: bool) -> Call:
        again = op(name, op("aten::work")) if runs else op("aten::detach")
        inside = op("PythonDispatchMode", again) if mode_range else again
        return op(name, inside, seq=seq, dims=SHAPE)

    def layer(first: int, linear_runs: bool) -> list[Call]:
        names = ("aten::layer_norm", "aten::linear", "aten::gelu", "aten::linear", "aten::gelu")
        return [
            dispatched(name, first + i, linear_runs or name != "aten::linear")
            for i, name in enumerate(names)
        ]

    forward = layer(0, linear_runs=True)
    facts = study_step(*forward, *gradients(forward, recompute=layer(50, linear_runs=False)))
    assert recompute_counts(facts) == [1, 0, 1, 0, 1]


def test_shapes_must_agree() -> None:
    forward = run(0)
    again = run(50, dims=[[4, 4]])
    facts = study_step(*forward, *gradients(forward, recompute=again))
    assert recompute_counts(facts) == [0, 0, 0, 0]
    assert len(facts.alignment.unexplained) == 4


def test_an_adjoint_that_calls_its_own_function_is_no_recompute() -> None:
    # The adjoint of an all-to-all is an all-to-all (torchrec).
    forward = [op("_AlltoAllSingle", op("aten::empty"), seq=0), *run(1, ("linear", "mse_loss"))]
    backward = [
        *gradients(forward[1:]),
        node("_AlltoAllSingleBackward", op("_AlltoAllSingle", op("aten::empty"), seq=9), seq=0),
    ]
    facts = study_step(*forward, *backward)
    assert facts.alignment.recomputes == ()


def test_operators_that_stand_nowhere_in_the_forward_are_unexplained() -> None:
    forward = run(0)
    foreign = run(50, ("relu", "embedding", "relu"))
    facts = study_step(*forward, *gradients(forward, recompute=foreign))
    assert recompute_counts(facts) == [0, 0, 0, 0]
    assert len(facts.alignment.unexplained) == 3


def test_recomputes_inside_ranges_of_the_user_are_found() -> None:
    forward = run(0)
    facts = study_step(
        annotation("layer", *forward), *gradients(forward, [annotation("layer", *run(50))])
    )
    assert recompute_counts(facts) == [1, 1, 1, 1]
