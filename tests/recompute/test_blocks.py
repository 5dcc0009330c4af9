"""Blocks: the layers of a forward pass, checkpointed or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from recompute_scan.annotations import RegionAnnotation, recompute_name, region_name
from recompute_scan.recompute.regions import list_regions
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.result import Checkpoint
from recompute_scan.trace import load
from tests.cases.case import record
from tests.cases.marked import annotating
from tests.cases.recorded import BY_NAME, recorded
from tests.recompute.training import (
    checkpointed_step,
    gradients,
    plain_step,
    reentrant,
    reentrant_backward,
    run,
    study_step,
)
from tests.trace_builder import Call, annotation, node, studied, thread


def blocks_of(facts: RecomputeFacts) -> list[tuple[int, int, int]]:
    """First and last forward operator of each block, and how many checkpoints are around it."""
    return [(b.span.first, b.span.last, len(b.checkpoints)) for b in facts.blocks]


def test_what_looks_like_a_recomputed_layer_is_a_block_without_checkpoint() -> None:
    facts = studied(thread(checkpointed_step(0, recomputes={0: 0, 2: 0})))
    assert blocks_of(facts) == [(0, 3, 0), (4, 7, 1), (8, 11, 0)]


def test_without_recomputes_what_repeats_is_a_block() -> None:
    facts = studied(thread(plain_step(0)))
    assert blocks_of(facts) == [(0, 3, 0), (4, 7, 0), (8, 11, 0)]


def test_what_repeats_in_a_small_part_of_the_forward_is_no_layer() -> None:
    repeated = run(0, 2 * ("relu", "gelu", "linear"))
    once = [call for i in range(12) for call in run(100 + i, ("linear",), dims=[[i, 8]])]
    forward = [*repeated, *once]
    assert blocks_of(study_step(*forward, *gradients(forward))) == []


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("n_layers_in_n_stack", ("several", "block")),
        ("r_layers_in_n_stack", ("several", "block")),
        ("n_layers_in_n_sequential", ("several", "block")),
        ("r_in_n", ("block", "block")),
        ("n_halves_in_n", ("block", "part")),
        ("n_first_half_in_n", ("block", "part")),
        ("n_halves", ("block",)),
        ("n_outside", ("block",)),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_what_checkpoints_are_around(
    name: str, around: tuple[str, ...], marked: bool, tmp_path: Path
) -> None:
    if marked:
        trace = tmp_path / "trace.json.gz"
        with annotating():
            record(BY_NAME[name], trace)
    else:
        trace = recorded(name)[0]
    first = list_regions(study(load(trace)))[0]
    assert tuple(checkpoint.around for checkpoint in first.checkpoints) == around
    assert [checkpoint.depth for checkpoint in first.checkpoints] == list(range(len(around)))


def test_stem_and_head_are_no_blocks() -> None:
    stem, layers = run(0, ("embedding",)), [run(10), run(20)]
    head = run(30, ("linear", "mse_loss"))
    backward = [*gradients(head), *gradients(layers[1], run(50)), *gradients(layers[0], run(60))]
    facts = study_step(*stem, *layers[0], *layers[1], *head, *backward, *gradients(stem))
    assert blocks_of(facts) == [(1, 4, 1), (5, 8, 1)]


SHORT = ("linear", "gelu")


def test_what_is_around_several_is_around_the_one_whose_own_recompute_is_missing() -> None:
    """Two layers in one checkpoint, each in its own; that of the second has nothing to do."""
    found = list_regions(study(load(recorded("n_layers_in_n_sequential")[0])))
    around = [tuple(one.around for one in region.checkpoints) for region in found]
    assert around == [("several", "block"), ("several",), ("block",), ("block",)]
    assert [[one.depth for one in region.checkpoints] for region in found] == [
        [0, 1],
        [0],
        [0],
        [0],
    ]


@pytest.mark.parametrize("between", [(), ("relu",)])
@pytest.mark.parametrize("checkpointed", [{0, 1}, {1, 2}, {2, 3}, {0, 2}])
def test_layers_too_short_to_be_known_anywhere_are_known_in_a_row(
    between: tuple[str, ...], checkpointed: set[int]
) -> None:
    layers = [(*run(10 * place, SHORT), *run(10 * place + 5, between)) for place in range(4)]
    backward = [
        call
        for place in reversed(range(4))
        for call in (
            *gradients(layers[place][2:]),
            *gradients(layers[place][:2], run(100 + place, SHORT) if place in checkpointed else ()),
        )
    ]
    facts = study_step(*(call for layer in layers for call in layer), *backward)
    assert blocks_of(facts) == [
        (place * len(layer), place * len(layer) + 1, int(place in checkpointed))
        for place, layer in enumerate(layers)
    ]


def test_what_is_as_short_as_a_layer_and_stands_elsewhere_is_none() -> None:
    layers, head = [run(10, SHORT), run(20, SHORT)], run(30, ("layer_norm", *SHORT))
    again = [
        gradients(layer, run(number, SHORT))
        for layer, number in zip(reversed(layers), (100, 110), strict=True)
    ]
    backward = [call for calls in (gradients(head), *again) for call in calls]
    facts = study_step(*layers[0], *layers[1], *head, *backward)
    assert blocks_of(facts) == [(0, 1, 1), (2, 3, 1)]


def test_layers_inside_one_checkpoint_are_the_blocks() -> None:
    """The stack under one reentrant checkpoint, each layer under its own."""
    stack = [call for place in range(3) for call in run(10 * place)]
    inner = [run(100 + 10 * place) for place in range(3)]
    recompute = [reentrant(50 + place, run(0)) for place in range(3)]
    nested = [reentrant_backward(50 + place, inner[place]) for place in (2, 1, 0)]
    backward = node("CheckpointFunctionBackward", *recompute, *nested, seq=5)
    facts = study_step(reentrant(5, stack), backward)
    assert blocks_of(facts) == [(0, 3, 2), (4, 7, 2), (8, 11, 2)]
    assert [region.recompute_runs_per_backward for region in list_regions(facts)] == [2, 2, 2]


def test_the_same_layer_of_every_step_is_one_region() -> None:
    facts = studied(thread(checkpointed_step(0), checkpointed_step(1), checkpointed_step(2)))
    regions = list_regions(facts)
    assert [region.ordinal for region in regions] == [0, 1, 2]
    assert [region.forward_runs_per_step for region in regions] == [1, 1, 1]
    assert all(region.signature.startswith("4 operators: layer_norm, linear") for region in regions)
    # 12 µs for each of four operators, and a microsecond between them.
    assert {round(region.forward_ms_per_step, 6) for region in regions} == {0.048}


def marked_step() -> list[Call]:
    """Two layers under two checkpoints each, of which the inner one never recomputes."""
    forward: list[Call] = []
    backward: list[Call] = []
    for layer in range(2):
        own = run(10 * layer)
        outer = RegionAnnotation(
            2 * layer + 1,
            0,
            "non-reentrant",
            f"layers.{layer}",
            "Layer",
            "fsdp-wrapper",
            "train.py:3",
        )
        inner = RegionAnnotation(2 * layer + 2, 1, "reentrant", "", "", "", "")
        inside = annotation(region_name(inner), *own)
        forward.append(annotation(region_name(outer), inside))
        again = annotation(recompute_name(2 * layer + 1), *run(500 + 10 * layer))
        backward = [*gradients(own, [again]), *backward]
    return [*forward, *backward]


def test_marks_give_names_call_sites_and_both_checkpoints() -> None:
    facts = study_step(*marked_step())
    assert facts.annotations is not None
    assert facts.annotations.disagreeing == 0
    assert [call.recomputes for call in facts.annotations.calls] == [1, 0, 1, 0]
    regions = list_regions(facts)
    assert [(region.module, region.module_class) for region in regions] == [
        ("layers.0", "Layer"),
        ("layers.1", "Layer"),
    ]
    assert regions[0].checkpoints == (
        Checkpoint(0, "non-reentrant", "fsdp-wrapper", "train.py:3"),
        Checkpoint(1, "reentrant"),
    )


def test_marks_that_the_operators_deny_are_counted() -> None:
    """A recompute outside every marked one."""
    forward = run(0)
    wrong = annotation(region_name(RegionAnnotation(1, 0, "reentrant")), *forward)
    facts = study_step(wrong, *gradients(forward, run(50)))
    assert facts.annotations is not None
    assert (facts.annotations.disagreeing, facts.annotations.recomputed) == (4, 4)
