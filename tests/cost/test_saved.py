"""How many tensors autograd saves, as counted in a trace, against autograd's own hooks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from recompute_scan.cost.reruns import saved_by
from recompute_scan.recompute.roles import classify
from recompute_scan.trace import load
from recompute_scan.trace.calls import nest

WIDTH = 16
Made = Callable[[Tensor], Tensor]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def recurrent(layer: nn.RNNBase, *states: Tensor) -> Made:
    return lambda x: torch.as_tensor(layer(x, *states)[0])


# The state before the first step; autograd saves one that has a gradient.
START = torch.zeros(1, 2, WIDTH, requires_grad=True)


class Square(torch.autograd.Function):
    """A function that a script brings, and that saves one tensor."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (saved,) = context.saved_tensors
        return torch.mul(2 * gradient, saved)


BLOCKS: dict[str, Made] = {
    "linear": nn.Linear(WIDTH, WIDTH),
    "linear, frozen": frozen(nn.Linear(WIDTH, WIDTH)),
    "linear without bias": nn.Linear(WIDTH, WIDTH, bias=False),
    "gru": recurrent(nn.GRU(WIDTH, WIDTH, batch_first=True), START),
    "lstm": recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "rnn": recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True), START),
    "layer norm": nn.LayerNorm(WIDTH),
    "rms norm": nn.RMSNorm(WIDTH),
    "sigmoid in place": lambda x: (x + 1).sigmoid_(),
    "relu in place": lambda x: functional.relu(x + 1, inplace=True),
    "product in place": lambda x: (x + 1).mul_(x),
    "exp in place": lambda x: (x + 1).exp_(),
    "mean": lambda x: x.mean(-1),
    "variance": lambda x: x.var(-1),
    "norm": functional.normalize,
    "attention": lambda x: functional.scaled_dot_product_attention(*3 * (x[None],)),
    "scores": lambda x: torch.softmax(x @ x.mT, -1) @ x,
    "activations": lambda x: functional.elu(functional.mish(functional.softplus(x))),
    "clamped": lambda x: functional.hardtanh(functional.hardswish(x.abs())),
    "gated": functional.glu,
    "the largest": lambda x: x.topk(2)[0] + x.max(-1, keepdim=True)[0],
    "rows": lambda x: x[:, torch.tensor([0, 2])],
    "masked": lambda x: x.masked_fill(x > 0.5, 0.0).maximum(x),
    "pooled": lambda x: functional.avg_pool2d(x, 2),
    "function of a script": lambda x: torch.as_tensor(Square.apply(x + 1)),
    "loss": lambda x: functional.mse_loss(x, x.exp()),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_run_with_gradients_saves(name: str, tmp_path: Path) -> None:
    block, x = BLOCKS[name], torch.rand(2, 5, WIDTH, requires_grad=True)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        block(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        block(x).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    calls = nest(load(tmp_path / "trace.json"))
    assert saved_by(calls, classify(calls).role).sum() == len(kept)
