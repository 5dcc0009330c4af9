"""Autograd functions whose gradients run *other* functions again, and some that only look so.

Each function counts its calls itself, inside and outside backward passes; nothing here knows
of the analyser.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

RUNS: Counter[tuple[str, bool]] = Counter()
"""Calls by function and whether they were inside a backward pass."""


def _count(function: str) -> None:
    RUNS[function, torch._C._current_graph_task_id() != -1] += 1


class CountedNorm(torch.autograd.Function):
    """A norm; its gradient computes from what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _count("CountedNorm")
        ctx.save_for_backward(x)
        result: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        scale = ctx.saved_tensors[0].pow(2).sum(-1, keepdim=True).div(x.shape[-1]).pow(-0.5)
        along = (grad * x).sum(-1, keepdim=True) / x.shape[-1]
        result: Tensor = scale * grad - x * scale.pow(3) * along
        return result


class NormedProduct(torch.autograd.Function):
    """A norm and a product in one; the norm's result is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        result: Tensor = CountedNorm.apply(x) @ weight.T
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            normed = CountedNorm.apply(leaf)
        (inner,) = torch.autograd.grad(normed, leaf, grad @ weight)
        return inner, grad.flatten(0, -2).T @ normed.detach().flatten(0, -2)


class ProductAfterNorm(torch.autograd.Function):
    """A product of a norm's result, handed over with what it was made from; the latter is kept."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return normed @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        normed = CountedNorm.apply(x)
        return grad @ weight, None, grad.flatten(0, -2).T @ normed.flatten(0, -2)


class Spread(torch.autograd.Function):
    """Its gradient is `Gathered`, whose gradient it is: no recompute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _count("Spread")
        return torch.cat([x, x], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = Gathered.apply(grad)
        return result


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _count("Gathered")
        one, two = x.chunk(2, -1)
        return one + two

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = Spread.apply(grad)
        return result


class Turned(torch.autograd.Function):
    """A rotation: its gradient turns back, by the same operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: bool) -> Tensor:
        _count("Turned")
        ctx.back = back
        one, two = x.chunk(2, -1)
        two = two * (-1 if back else 1)
        return torch.cat([one * 0.8 - two * 0.6, one * 0.6 + two * 0.8], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Turned.forward(ctx, grad, not ctx.back), None


class TurnedProduct(torch.autograd.Function):
    """A product, then a rotation, whose gradient it runs by the rotation itself: no recompute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        result: Tensor = Turned.apply(x @ weight.T, False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        back = Turned.apply(grad, True)
        return back @ weight, back.flatten(0, -2).T @ x.flatten(0, -2)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = NormedProduct.apply(x, weight)
    return result


def after_norm(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = ProductAfterNorm.apply(CountedNorm.apply(x), x.detach(), weight)
    return result


def kept(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(CountedNorm.apply(x), weight)


def spread(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Gathered.apply(F.gelu(Spread.apply(F.linear(x, weight))))
    return result


def turned(x: Tensor, weight: Tensor) -> Tensor:
    plain: Tensor = Turned.apply(x, False)
    result: Tensor = TurnedProduct.apply(plain, weight)
    return result


Block = Callable[[Tensor, Tensor], Tensor]
