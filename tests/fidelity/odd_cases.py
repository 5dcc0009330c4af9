"""Trainings whose tensors lie in odd memory, or whose states are in odd places.

In the same form as :mod:`tests.fidelity.cases`; their labels are measured likewise.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.fidelity.cases import Case, D, Mlp, Net, Own, adding_to, caller, net

ODD: list[Case] = []
# What cannot be seen, as docs/fidelity.md says.
UNSEEN: list[Case] = []


right, wrong = adding_to(ODD)


def own(then: Callable[[Own, torch.Tensor], torch.Tensor], **options: Any) -> Any:
    """Builds a net of layers that do this after a product."""
    return net(lambda: Own(then), **options)


DROPPED: dict[str, Any] = {"preserve_rng_state": False}


def plain(layer: Any, *args: Any) -> Any:
    return layer(*args)


# Buffers


class Graph(nn.Module):
    """A product with a sparse buffer, as graph networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("adjacency", (torch.eye(8) + torch.eye(8).roll(1, 0)).to_sparse())

    def forward(self, x: torch.Tensor) -> Any:
        return torch.sparse.mm(self.adjacency, self.lin(x)).tanh()


class Turned(nn.Module):
    """Turns pairs by complex numbers, which are averaged where asked for."""

    freqs: torch.Tensor

    def __init__(self, averaged: bool) -> None:
        super().__init__()
        self.lin, self.averaged = nn.Linear(D, D), averaged
        self.register_buffer("freqs", torch.polar(torch.ones(D // 2), torch.arange(D // 2).float()))

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.view_as_complex(self.lin(x).view(-1, D // 2, 2))
        if self.averaged:
            with torch.no_grad():
                self.freqs.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return x + torch.view_as_real(y * self.freqs).flatten(1)


class GivenBack(nn.Module):
    """Reads memory that is taken for as long as the layer runs, at an offset, as FSDP does."""

    table: torch.Tensor

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.flat = torch.rand(D + D * D)
        self.kept = self.flat.clone()
        view = self.flat[D:].view(D, D)
        if buffer:
            self.register_buffer("table", view)
        else:
            self.table = view
        self.flat.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> Any:
        self.flat.untyped_storage().resize_(self.kept.nbytes)
        self.flat.copy_(self.kept)
        y = (self.lin(x) * self.table.sum(0).clone()).sin()
        self.flat.untyped_storage().resize_(0)
        return y


class CountsInRecompute(nn.Module):
    """Counts with autograd on only: of a reentrant checkpoint that is the recompute alone."""

    tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("tokens", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens.add_(y.abs().sum(0))
        return y.relu()


class Siblings(nn.Module):
    """Three modules behind one another in one function, as a DenseNet's layer checkpoints them: its
    region has the name of the first by the alphabet.
    """

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.norm, self.act, self.lin = nn.BatchNorm1d(D), nn.ReLU(), nn.Linear(D, D)
        self.on = on

    def forward(self, x: torch.Tensor) -> Any:
        norm, act, lin = self.norm, self.act, self.lin

        def run(x: torch.Tensor) -> Any:
            return lin(act(norm(x)))

        return checkpoint(run, x, use_reentrant=False) if self.on else run(x)


wrong("BatchNorm beside what its region is called")(
    lambda on: Net([Siblings(on) for _ in range(3)], plain), buffers=True
)


class TwiceIsOnce(nn.BatchNorm1d):
    """Two updates with the one momentum are one with the other."""

    def __init__(self, on: bool) -> None:
        super().__init__(D, momentum=1 - math.sqrt(0.9) if on else 0.1)
        self.num_batches_tracked = None


right("a sparse buffer")(net(Graph))
right("a sparse buffer, reentrant")(net(Graph, use_reentrant=True))
right("a complex buffer")(net(lambda: Turned(False)))
wrong("a complex buffer that is averaged", "buffer", "freqs")(net(lambda: Turned(True)))
right("memory that is given back between")(net(lambda: GivenBack(False)))
right("a buffer that is given back between")(net(lambda: GivenBack(True)))
right("a buffer that is given back between, reentrant")(
    net(lambda: GivenBack(True), use_reentrant=True)
)
right("counts in the recompute only")(net(CountsInRecompute, use_reentrant=True))
wrong("counts in both", "buffer", "tokens")(net(CountsInRecompute), buffers=True)
UNSEEN.append(
    Case(
        "BatchNorm whose momentum is made for two updates",
        False,
        lambda on: Net([Mlp(behind=TwiceIsOnce(on)) for _ in range(3)], caller(on)),
    )
)

# Transforms, and tensors without memory


def _jvp(_: Any, x: torch.Tensor) -> Any:
    y = x.detach()
    return x * torch.func.jvp(lambda v: v * 2 + v.detach().sin(), (y,), (torch.ones_like(y),))[1]


def _dual(_: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(dual.sin() * torch.ones_like(dual)).tangent
    assert tangent is not None
    return x * tangent


def _functionalized(_: Any, x: torch.Tensor) -> Any:
    return x * torch.func.functionalize(lambda v: v.clone().add_(1).mul_(v))(x.detach())


def _quantized(_: Any, x: torch.Tensor) -> Any:
    y = x.detach()
    return x + (torch.quantize_per_tensor(y, 0.05, 0, torch.qint8).dequantize() - y)


def _halved(bits: torch.Tensor) -> Any:
    """Bytes as pairs of small numbers, and back."""
    return bits.to(torch.uint8).view(torch.float4_e2m1fn_x2).view(torch.uint8).float()


def _float4(_: Any, x: torch.Tensor) -> Any:
    return x * (_halved(x.detach() > 0) + 1)


def _float4_noise(_: Any, x: torch.Tensor) -> Any:
    return x * (_halved(torch.rand(x.shape) > 0.5) + 1)


for name, then in {
    "jvp": _jvp,
    "dual numbers": _dual,
    "functionalize": _functionalized,
    "quantized": _quantized,
}.items():
    right(f"{name}, non-reentrant")(own(then))
    if then is not _dual:  # whose levels a reentrant checkpoint leaves
        right(f"{name}, reentrant")(own(then, use_reentrant=True))
if hasattr(torch, "float4_e2m1fn_x2"):
    right("float4")(own(_float4))
    wrong("float4, noise", "aten.rand")(own(_float4_noise, **DROPPED))

# Random numbers


def _one_normal(_: Any, x: torch.Tensor) -> Any:
    return x * float(np.random.randn())


def _jitter(_: Any, x: torch.Tensor) -> Any:
    y = x.bfloat16()
    return (y * (1 + 0.02 * (torch.rand(y.shape) - 0.5)).bfloat16()).float()


def _masked_at_random(_: Any, x: torch.Tensor) -> Any:
    y = x.clone()
    start = random.randrange(D - 6)
    y[:, start : start + 6] = 0
    return y


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Another default type, which the backward pass does not run under."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


wrong("one normal number of numpy's", "random aten.mul", "layers")(own(_one_normal))
wrong("one percent of noise in bfloat16", "random aten.rand")(own(_jitter, **DROPPED))
right("one percent of noise in bfloat16, kept")(own(_jitter))
wrong("columns masked at random", "random", "layers")(own(_masked_at_random))
wrong("numbers of another type drawn in the recompute", "type aten.rand", "layers")(
    own(lambda _, x: x + torch.rand(D).float()), around=wide
)

# Checkpoints by hand


class Reversible(torch.autograd.Function):
    """Its inputs come from its outputs in the backward pass, up to rounding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Any) -> Any:
        one, other = x.chunk(2, -1)
        with torch.no_grad():
            one = one + block.first(other)
            other = other + block.second(one)
        ctx.block, ctx.y = block, torch.cat([one, other], -1)
        return ctx.y.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        one, other = ctx.y.chunk(2, -1)
        grad_one, grad_other = grad.chunk(2, -1)
        for run in (ctx.block.second, ctx.block.first):
            one = one.detach().requires_grad_()
            with torch.enable_grad():
                again = run(one)
            (more,) = torch.autograd.grad(again, one, grad_other, retain_graph=True)
            torch.autograd.backward(again, grad_other)
            one, other = (other - again).detach(), one.detach()
            grad_one, grad_other = grad_other, grad_one + more
        return torch.cat([grad_one, grad_other], -1), None


class Halves(nn.Module):
    """Two residual branches, each of half of what it gets."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on
        self.first, self.second = (
            nn.Sequential(nn.Linear(D // 2, D // 2), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> Any:
        if self.on:
            return Reversible.apply(x, self)
        one, other = x.chunk(2, -1)
        one = one + self.first(other)
        return torch.cat([one, other + self.second(one)], -1)


class InOrder(torch.autograd.Function):
    """A checkpoint that keeps its input in the order of its dimensions."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x.contiguous())
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Picture(Net):
    """Its channels lie last in the forward."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x).view(-1, 4, 8, 8).to(memory_format=torch.channels_last)
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()


right("reversible blocks")(lambda on: Net([Halves(on) for _ in range(3)], plain))
right("channels last in the forward only")(
    lambda on: Picture(
        [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)], InOrder.apply if on else plain
    ),
    shape=(16, D),
)
