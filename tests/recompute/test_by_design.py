"""Forward work that runs again in other functions' gradients, against their own counts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.report.render import render_text
from recompute_scan.result import Result
from tests.cases import designs
from tests.cases.designs import RUNS, Block

LAYERS = 3
STEPS = 2
WIDTH = 16


def trained(block: Block, trace: Path, around: str = "none") -> Result:
    """The answer on some steps of a model of such blocks; their runs are counted in ``RUNS``."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(LAYERS)]
    adamw = torch.optim.AdamW(weights)

    def step() -> None:
        x: Tensor = torch.randn(4, WIDTH, requires_grad=True)
        for weight in weights:
            if around == "none":
                x = x + block(x, weight)
            else:
                x = x + checkpoint(block, x, weight, use_reentrant=around == "reentrant")
        x.square().mean().backward()
        adamw.step()
        adamw.zero_grad()

    step()
    RUNS.clear()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(trace))
    return analyse([trace])


@pytest.mark.parametrize(
    ("block", "inside"),
    [(designs.normed, "NormedProduct"), (designs.after_norm, "ProductAfterNorm")],
)
def test_the_counts_are_the_functions_own(block: Block, inside: str, tmp_path: Path) -> None:
    result = trained(block, tmp_path / "trace.json")
    assert (result.verdict, result.recompute_per_backward) == ("partial", 1.0)
    (found,) = result.by_design
    assert (found.function, found.inside) == ("CountedNorm", (inside,))
    steps = len(result.steps)
    assert found.forward_per_step * steps == RUNS["CountedNorm", False] == LAYERS * STEPS
    assert found.recomputed_per_step * steps == RUNS["CountedNorm", True] == LAYERS * STEPS
    assert found.recompute_ms_per_step > 0
    assert result.cost is not None
    assert result.cost.breakdown.recompute > 0
    assert result.findings == ()
    said = " ".join(render_text(result, color=False).split())
    assert "by the model's own design" in said
    assert "redundant recomputes" not in said
    assert "No checkpoint needs a change" in said


@pytest.mark.parametrize("block", [designs.kept, designs.spread, designs.turned])
def test_gradients_that_call_functions_are_no_recompute(block: Block, tmp_path: Path) -> None:
    result = trained(block, tmp_path / "trace.json")
    assert (result.verdict, result.by_design) == ("none", ())
    inside = sum(number for (_, backward), number in RUNS.items() if backward)
    assert bool(inside) == (block is not designs.kept)


@pytest.mark.parametrize("around", ["reentrant", "non-reentrant"])
def test_a_checkpoint_around_is_told_apart(around: str, tmp_path: Path) -> None:
    """The checkpoint runs the norm again once, and the gradient once more."""
    result = trained(designs.normed, tmp_path / "trace.json", around)
    assert (result.verdict, result.recompute_per_backward) == ("full", 1.0)
    assert RUNS["CountedNorm", True] == 2 * RUNS["CountedNorm", False]
    (found,) = result.by_design
    assert found.recomputed_per_step == found.forward_per_step


class Pieces(torch.autograd.Function):
    """Runs its block in two pieces, again in its backward, with work between that is no run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return torch.cat([_block(piece, weight) for piece in x.chunk(2)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        found: list[Tensor] = []
        total = torch.zeros_like(weight)
        for piece, grad in zip(x.chunk(2), grads[0].chunk(2), strict=True):
            with torch.enable_grad():
                own = (piece - 0).detach().requires_grad_()
                result = _block(own, weight)
            to_piece, to_weight = torch.autograd.grad(result, (own, weight), grad)
            found.append(to_piece)
            total += to_weight
        return torch.cat(found), total


def _block(x: Tensor, weight: Tensor) -> Tensor:
    RUNS["block", torch._C._current_graph_task_id() >= 0] += 1
    return torch.tanh(x @ weight).sigmoid()


@pytest.mark.parametrize("around", ["none", "reentrant", "non-reentrant"])
def test_a_block_in_pieces_runs_by_design_and_for_the_checkpoint(
    around: str, tmp_path: Path
) -> None:
    result = trained(Pieces.apply, tmp_path / "trace.json", around)
    assert result.verdict == ("partial" if around == "none" else "full")
    assert result.recompute_per_backward == 1.0
    (found,) = result.by_design
    assert (found.function, found.with_gradients) == ("Pieces", True)
    again = 1 if around == "none" else 2  # by the function, and by the checkpoint around it
    assert RUNS["block", True] == again * RUNS["block", False] == again * 2 * LAYERS * STEPS
    assert found.recomputed_per_step * len(result.steps) == LAYERS * STEPS


def quantized(x: Tensor, weight: Tensor) -> Tensor:
    """Most of its operators have no gradient, as those of fake quantization."""
    scale = x.detach().abs().amax().clamp(min=1e-3).mul(1.0).add(0.0).div(1.0)
    rounded = x.detach().div(scale).mul(127).round().clamp(-127, 127).div(127).mul(scale)
    return torch.tanh((x + (rounded - x).detach()) @ weight)


def test_operators_without_a_gradient_do_not_hide_the_count(tmp_path: Path) -> None:
    result = trained(quantized, tmp_path / "trace.json", "non-reentrant")
    assert (result.verdict, result.recompute_per_backward) == ("full", 1.0)
