"""Custom autograd functions that run forward work again in their own backward, by design.

No checkpoint is involved and no layer runs again; a trace shows forward operators inside a
backward pass all the same.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .case import Build
from .loops import ordinary, stepping
from .model import Mlp, Model, Oracle

CHUNKS = 4


class RecomputedMlp(torch.autograd.Function):
    """gelu(x A) B that keeps x alone and computes the hidden layer again for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(x, up, up_bias, down)
        return F.linear(F.gelu(F.linear(x, up, up_bias)), down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, up, up_bias, down = ctx.saved_tensors
        before = F.linear(x, up, up_bias)
        hidden = F.gelu(before)
        flat = grad.flatten(0, -2)
        inner = torch.ops.aten.gelu_backward(grad @ down, before)
        return (
            inner @ up,
            inner.flatten(0, -2).T @ x.flatten(0, -2),
            inner.flatten(0, -2).sum(0),
            flat.T @ hidden.flatten(0, -2),
        )


class ChunkedLoss(torch.autograd.Function):
    """Head and cross-entropy in chunks; the backward runs each chunk again under autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, target)
        parts = zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        losses = [F.cross_entropy(F.linear(p, weight, bias), t, reduction="sum") for p, t in parts]
        return torch.stack(losses).sum() / len(target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, bias, target = ctx.saved_tensors
        leaves = [y.detach().requires_grad_() for y in (x, weight, bias)]
        with torch.enable_grad():
            for part, labels in zip(leaves[0].chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
                loss = F.cross_entropy(F.linear(part, *leaves[1:]), labels, reduction="sum")
                torch.autograd.backward(loss * (grad / len(target)))
        return leaves[0].grad, leaves[1].grad, leaves[2].grad, None


class FusedMlp(Mlp):
    """The MLP half, computed by :class:`RecomputedMlp`."""

    def transform(self, x: Tensor) -> Tensor:
        result: Tensor = RecomputedMlp.apply(x, self.up.weight, self.up.bias, self.down.weight)
        return result + self.down.bias


def recomputed_mlp() -> Build:
    """Every MLP half recomputes its hidden layer inside its own formula."""

    def change(model: Model, oracle: Oracle) -> None:
        for i, layer in enumerate(model.layers):
            layer.mlp = FusedMlp(oracle, f"layers.{i}")

    return stepping(ordinary, change=change)


def chunked_loss() -> Build:
    """The head and the loss run again inside their own formula, chunk by chunk."""

    def backward(model: Model, tokens: Tensor) -> None:
        x = model.norm(model.stack(model.embedding(tokens)))
        flat, target = x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        loss: Tensor = ChunkedLoss.apply(flat, model.head.weight, model.head.bias, target)
        loss.backward()

    return stepping(backward)
