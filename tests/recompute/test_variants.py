"""Which checkpoint is which, from operators alone: the nesting itself is the truth."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.recompute.study import study
from recompute_scan.result import Region
from recompute_scan.trace import load
from tests.cases.case import Case, record
from tests.cases.equal import layered
from tests.cases.loops import two_losses
from tests.cases.model import NON_REENTRANT, REENTRANT, Checkpoints
from tests.cases.trees import equal_layers

VARIANTS = {"R": REENTRANT, "N": NON_REENTRANT}
# Around each layer, and around all. Early stop is off, or of two N the outer one's recompute would
# end before the inner one's work; in a backward pass it is on, so there are no two N inside an R.
NESTINGS = [
    (stack, layer)
    for stack in ("", "R", "N")
    for size in (1, 2, 3)
    for layer in map("".join, product("RN", repeat=size))
    if not ("R" in (stack + layer) and "NN" in (stack + layer).partition("R")[2])
]


def regions(trace: Path) -> tuple[Region, ...]:
    return analyse([trace]).regions


@pytest.mark.parametrize(
    ("stack", "layer"),
    [
        pytest.param(*nesting, marks=() if number % 3 == 0 else pytest.mark.slow)
        for number, nesting in enumerate(NESTINGS)
    ],
)
def test_each_nesting_is_read_off_the_operators(stack: str, layer: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    record(Case("", "", None, layered(equal_layers(2, layer, stack=stack))), trace)
    found = regions(trace)
    assert [[c.variant for c in region.checkpoints] for region in found] == [
        [VARIANTS[letter] for letter in stack + layer]
    ] * 2
    assert [[c.around for c in region.checkpoints] for region in found] == [
        ["several"] * len(stack) + ["block"] * len(layer)
    ] * 2


@pytest.mark.parametrize(
    "asked", [Checkpoints(outer=NON_REENTRANT, inner=REENTRANT), Checkpoints(outer=REENTRANT)]
)
def test_a_second_backward_pass_adds_no_checkpoint(asked: Checkpoints, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    record(Case("", "", None, two_losses(asked), backwards_per_forward=2), trace)
    facts = study(load(trace))
    assert facts.alignment.backwards.max() == 2
    for region in regions(trace):
        assert [c.variant for c in region.checkpoints] == [
            variant for variant in (asked.outer, asked.inner) if variant
        ]


def test_saved_results_without_operators_inside_are_no_recompute(tmp_path: Path) -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    def gated(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x) * torch.sigmoid(x)

    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        x = torch.randn(16, 64)
        for weight in weights:
            x = checkpoint(gated, x @ weight, use_reentrant=False, context_fn=contexts)
        x.sum().backward()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    assert analyse([tmp_path / "trace.json"]).verdict == "none"
