"""Recomputes are found by matching the forward pass, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from recompute_scan.recompute.study import RecomputeFacts
from tests.recompute.training import (
    SHAPE,
    early_stopped,
    gradients,
    no_grad,
    recompute_counts,
    reentrant,
    reentrant_backward,
    run,
    study_step,
)
from tests.trace_builder import Call, annotation, launch, node, op, thread


def matched(facts: RecomputeFacts) -> list[list[int]]:
    """For each recompute: places in the forward sequence of the operators that it repeats."""
    places = {int(row): place for place, row in enumerate(facts.alignment.forward)}
    return [
        [places[int(row)] for row in recompute.original] for recompute in facts.alignment.recomputes
    ]


def test_nothing_runs_again_in_an_ordinary_backward() -> None:
    forward = run(0)
    facts = study_step(*forward, *gradients(forward))
    assert matched(facts) == []
    assert recompute_counts(facts) == [0, 0, 0, 0]


def test_a_non_reentrant_recompute_repeats_its_layer() -> None:
    forward = run(0)
    facts = study_step(*forward, *gradients(forward, recompute=run(50)))
    assert matched(facts) == [[0, 1, 2, 3]]
    assert recompute_counts(facts) == [1, 1, 1, 1]


def test_a_reentrant_recompute_repeats_its_layer() -> None:
    facts = study_step(reentrant(5, run(0)), reentrant_backward(5, run(50)))
    assert matched(facts) == [[0, 1, 2, 3]]
    assert not facts.alignment.recomputes[0].inner_function


@pytest.mark.parametrize("reentrantly", [True, False])
def test_identical_layers_are_told_apart(reentrantly: bool) -> None:
    forward: list[Call] = []
    backward: list[Call] = []
    for layer in range(4):
        again = run(500 + 10 * layer)
        if reentrantly:
            forward = [*forward, reentrant(10 * layer, run(0))]
            backward = [reentrant_backward(10 * layer, again), *backward]
        else:
            own = run(10 * layer)
            forward = [*forward, *own]
            backward = [*gradients(own, again), *backward]
    facts = study_step(*forward, *backward)
    assert matched(facts) == [[12, 13, 14, 15], [8, 9, 10, 11], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_backward_on_a_thread_of_its_own_is_no_different() -> None:
    forward = run(0)
    engine = thread(*gradients(forward, recompute=run(50)), tid=2, start=100.0)
    facts = study_step(*forward, others=[engine])
    assert recompute_counts(facts) == [1, 1, 1, 1]


def test_two_identical_layers_recomputed_in_one_sequence_are_two_layers() -> None:
    # One checkpoint around both: the node of the second layer's end asks for all of it.
    first, second = run(0), run(10)
    again = [*run(50), *run(60)]
    facts = study_step(*first, *second, *gradients([*first, *second], again))
    assert matched(facts) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert recompute_counts(facts) == [1] * 8


@pytest.mark.parametrize("count", range(1, 5))
def test_layers_twice_in_one_sequence_are_doubled(count: int) -> None:
    # Non-reentrant around non-reentrant without early stop: a layer's last node asks for the
    # layer twice, and the equal layer before it must not be taken for the first of the two.
    layers = [run(10 * place) for place in range(count)]
    backward = [
        call
        for place in reversed(range(count))
        for call in gradients(layers[place], [*run(500 + 20 * place), *run(510 + 20 * place)])
    ]
    facts = study_step(*(call for layer in layers for call in layer), *backward)
    assert recompute_counts(facts) == [2] * 4 * count
    assert matched(facts) == [
        list(range(4 * place, 4 * place + 4)) for place in reversed(range(count)) for _ in range(2)
    ]


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


def test_early_stop_enters_the_last_operator_without_running_it() -> None:
    forward = run(0)
    facts = study_step(*forward, *gradients(forward, recompute=early_stopped(run(50))))
    assert matched(facts) == [[0, 1, 2, 3]]
    assert recompute_counts(facts) == [1, 1, 1, 0]


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


def test_a_recompute_with_holes_is_one_recompute() -> None:
    # Cached autocast casts are not made again.
    forward = run(0, ("linear", "gelu", "relu", "layer_norm", "linear", "gelu", "relu"))
    again = run(50, ("linear", "gelu", "relu", "linear", "gelu", "relu"))
    facts = study_step(*forward, *gradients(forward, recompute=again))
    assert recompute_counts(facts) == [1, 1, 1, 0, 1, 1, 1]
    assert len(facts.alignment.recomputes) == 1


def test_bookkeeping_that_a_checkpoint_adds_is_left_out() -> None:
    forward = run(0)
    again = [op("aten::detach"), *run(50)[:2], op("aten::alias"), *run(60)[2:]]
    facts = study_step(*forward, *gradients(forward, recompute=again))
    assert recompute_counts(facts) == [1, 1, 1, 1]
    assert len(facts.alignment.unexplained) == 0


def test_shapes_must_agree() -> None:
    forward = run(0)
    again = run(50, dims=[[4, 4]])
    facts = study_step(*forward, *gradients(forward, recompute=again))
    assert recompute_counts(facts) == [0, 0, 0, 0]
    assert len(facts.alignment.unexplained) == 4


def test_double_backward_is_no_recompute() -> None:
    """With gradients of gradients wanted, a formula's own operators are numbered."""
    forward = run(0, ("linear", "gelu", "linear", "gelu"))
    numbered = [
        node("AddmmBackward0", op("aten::t", seq=60), op("aten::linear", seq=61), seq=2),
        node("GeluBackward0", op("aten::gelu", seq=62, dims=SHAPE), seq=1),
        node("AddmmBackward0", op("aten::t", seq=63), op("aten::linear", seq=64), seq=0),
    ]
    facts = study_step(*forward, *gradients(forward), *numbered)
    assert recompute_counts(facts) == [0, 0, 0, 0]


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


def test_the_next_micro_batch_is_no_recompute() -> None:
    one, two = run(0), run(20)
    facts = study_step(*one, *gradients(one), *two, *gradients(two))
    assert recompute_counts(facts) == [0] * 8
    assert sorted(set(facts.counts.batch.tolist())) == [0, 1]


def test_a_forward_without_gradients_is_neither_recomputed_nor_counted() -> None:
    # An evaluation pass, or a frozen teacher.
    forward = run(0)
    facts = study_step(*no_grad(run(0)), *forward, *gradients(forward, recompute=run(50)))
    assert recompute_counts(facts) == [1, 1, 1, 1]
    assert facts.counts.counted.tolist() == [False] * 4 + [True] * 4


def test_recomputes_inside_ranges_of_the_user_are_found() -> None:
    forward = run(0)
    facts = study_step(
        annotation("layer", *forward), *gradients(forward, [annotation("layer", *run(50))])
    )
    assert recompute_counts(facts) == [1, 1, 1, 1]
