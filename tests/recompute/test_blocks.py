"""Blocks: the layers of a forward pass, checkpointed or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.annotations import RegionAnnotation, region_name
from recompute_scan.recompute.regions import list_regions
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import load
from tests.cases.case import Case, TrainingStep, record
from tests.cases.marked import annotating
from tests.cases.model import Oracle
from tests.cases.recorded import BY_NAME, recorded
from tests.effort import some
from tests.recompute.training import (
    checkpointed_step,
    gradients,
    run,
    study_step,
)
from tests.trace_builder import annotation, studied, thread


def blocks_of(facts: RecomputeFacts) -> list[tuple[int, int, int]]:
    """First and last forward operator of each block, and how many checkpoints are around it."""
    return [(b.span.first, b.span.last, len(b.checkpoints)) for b in facts.blocks]


def test_what_repeats_in_a_small_part_of_the_forward_is_no_layer() -> None:
    repeated = run(0, 2 * ("relu", "gelu", "linear"))
    once = [call for i in range(12) for call in run(100 + i, ("linear",), dims=[[i, 8]])]
    forward = [*repeated, *once]
    assert blocks_of(study_step(*forward, *gradients(forward))) == []


def test_a_part_of_a_part_has_each_checkpoint_once(tmp_path: Path) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList((nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)))

        def forward(self, x: Tensor, depth: int = 0) -> Any:
            if depth == 3:
                return x
            before, behind = ((F.tanh, F.sigmoid), (F.relu, torch.exp), (F.gelu, torch.cos))[depth]

            def run(x: Tensor) -> Tensor:
                return behind(self(before(self.parts[depth](x)), depth + 1))

            return checkpoint(run, x, use_reentrant=False)

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        net = nn.Sequential(*(Deep() for _ in range(3)))
        return lambda: net(torch.randn(4, 8)).sum().backward()

    record(Case("deep", "Three checkpoints in each other.", None, build), tmp_path / "trace.json")
    facts = study(load(tmp_path / "trace.json"))
    assert {tuple(len(part.checkpoints) for part in one.parts) for one in facts.blocks} == {(2, 3)}


AROUND = [
    ("n_layers_in_n_stack", ("several", "block")),
    ("r_layers_in_n_stack", ("several", "block")),
    ("n_layers_in_n_sequential", ("several", "block")),
    ("r_in_n", ("block", "block")),
    ("n_halves_in_n", ("block", "part")),
    ("n_first_half_in_n", ("block", "part")),
    ("n_halves", ("block",)),
    ("n_outside", ("block",)),
]


@pytest.mark.parametrize(
    ("name", "around", "marked"),
    [*((*one, False) for one in AROUND), *((*one, True) for one in some(AROUND, 3))],
)
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


SHORT = ("linear", "gelu")


def test_what_is_around_several_is_around_the_one_whose_own_recompute_is_missing() -> None:
    """Two layers in one checkpoint, each in its own; that of the second has nothing to do."""
    found = list_regions(study(load(recorded("n_layers_in_n_sequential")[0])))
    around = [tuple(one.around for one in region.checkpoints) for region in found]
    assert around == [("several", "block"), ("several",), ("block",), ("block",)]
    depths = [[one.depth for one in region.checkpoints] for region in found]
    assert depths == [[0, 1], [0], [0], [0]]


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


def test_the_same_layer_of_every_step_is_one_region() -> None:
    facts = studied(thread(checkpointed_step(0), checkpointed_step(1), checkpointed_step(2)))
    regions = list_regions(facts)
    assert [region.ordinal for region in regions] == [0, 1, 2]
    assert [region.forward_runs_per_step for region in regions] == [1, 1, 1]
    assert all(region.signature.startswith("4 operators: layer_norm, linear") for region in regions)
    # 12 µs for each of four operators, and a microsecond between them.
    assert {round(region.forward_ms_per_step, 6) for region in regions} == {0.048}


def test_marks_that_the_operators_deny_are_counted() -> None:
    """A recompute outside every marked one."""
    forward = run(0)
    wrong = annotation(region_name(RegionAnnotation(1, 0, "reentrant")), *forward)
    facts = study_step(wrong, *gradients(forward, run(50)))
    assert facts.annotations is not None
    assert (facts.annotations.disagreeing, facts.annotations.recomputed) == (4, 4)
