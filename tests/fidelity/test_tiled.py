"""Functions that run their block on parts of what they get: gradients are right, and not called
wrong.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.record.bypass import Bypass, PlainFunctions
from recompute_scan.record.isolation import Guard
from tests.fidelity.cases import Case, D
from tests.fidelity.compare import compare, gradients, wrong
from tests.fidelity.truth import build, measure, step

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = (4, 12, D)


class Flattening(torch.autograd.Function):
    """After DeepSpeed's and Liger's ``TiledMLP``: parts of the sequence in the forward, of all
    tokens in the backward.
    """

    @staticmethod
    def forward(ctx: Any, fn: Any, module: Any, x: torch.Tensor, shards: int) -> Any:
        ctx.fn, ctx.module, ctx.shards = fn, module, shards
        ctx.save_for_backward(x)
        with torch.no_grad():
            parts = [fn(module, part) for part in torch.chunk(x, shards, dim=-2)]
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        shape, flat = x.shape, x.detach().reshape(-1, x.shape[-1])
        incoming, grad = grads[0].reshape(flat.shape), torch.zeros_like(flat)
        parts = torch.chunk(flat, ctx.shards, dim=0)
        for at, part in enumerate(parts):
            offset = at * parts[0].shape[0]
            part.requires_grad_()
            part.grad = grad.narrow(0, offset, part.shape[0])
            with torch.enable_grad():
                output = ctx.fn(ctx.module, part)
            torch.autograd.backward(output, incoming.narrow(0, offset, part.shape[0]))
        return None, None, grad.view(shape), None


def _again(ctx: Any, work: Callable[[Any], Any], grad: torch.Tensor, order: int = 1) -> Any:
    """The gradient of the input, part by part; the last part first where ``order`` is -1."""
    (x,) = ctx.saved_tensors
    found = []
    pairs = zip(x.detach().chunk(ctx.shards, 1), grad.chunk(ctx.shards, 1), strict=True)
    for part, incoming in list(pairs)[::order]:
        given = part.detach().requires_grad_()
        with torch.enable_grad():
            output = work(given)
        torch.autograd.backward(output, incoming)
        found.append(given.grad)
    return torch.cat(found[::order], 1)


class SameParts(torch.autograd.Function):
    """After Axolotl's ``TiledMLP``: the same parts both times."""

    @staticmethod
    def forward(ctx: Any, fn: Any, module: Any, x: torch.Tensor, shards: int) -> Any:
        ctx.fn, ctx.module, ctx.shards = fn, module, shards
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([fn(module, part) for part in x.chunk(shards, 1)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, _again(ctx, partial(ctx.fn, ctx.module), grads[0]), None


class Backwards(SameParts):
    """The last part first."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, _again(ctx, partial(ctx.fn, ctx.module), grads[0], -1), None


class Whole(SameParts):
    """Parts in the forward, and all at once in the backward."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        given = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.fn(ctx.module, given)
        torch.autograd.backward(output, grads[0])
        return None, None, given.grad, None


class OfAModule(torch.autograd.Function):
    """Runs a module, and no function."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: torch.Tensor, shards: int) -> Any:
        ctx.module, ctx.shards = module, shards
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([module(part) for part in x.chunk(shards, 1)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, _again(ctx, ctx.module, grads[0]), None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(
        self, on: bool, tiled: Callable[[nn.Module, torch.Tensor], Any], again: bool
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, 1)
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.on, self.tiled, self.again = on, tiled, again

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            run = self.tiled if self.on else (lambda layer, x: layer(x))
            if self.on and self.again:
                x = x + checkpoint(run, layer, x, use_reentrant=False)
            else:
                x = x + run(layer, x)
        return self.head(x).square().mean()


def _run(module: nn.Module, x: torch.Tensor) -> Any:
    return module(x)


KINDS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], Any], bool]] = {
    "other parts": (lambda m, x: Flattening.apply(_run, m, x, 4), False),
    "the same parts": (lambda m, x: SameParts.apply(_run, m, x, 3), True),
    "the same parts, the last first": (lambda m, x: Backwards.apply(_run, m, x, 3), True),
    "all at once behind": (lambda m, x: Whole.apply(_run, m, x, 3), False),
    "parts of which the last is smaller": (lambda m, x: SameParts.apply(_run, m, x, 5), True),
    "a module's": (lambda m, x: OfAModule.apply(m, x, 4), True),
    "one part": (lambda m, x: SameParts.apply(_run, m, x, 1), True),
}


@pytest.mark.parametrize("again", [False, True], ids=["alone", "in a checkpoint"])
@pytest.mark.parametrize("name", KINDS)
def test_right_gradients_are_not_called_wrong(name: str, again: bool) -> None:
    tiled, alike = KINDS[name]
    case = Case(name, False, lambda on: Net(on, tiled, again), shape=SHAPE)
    truth = measure(case)
    assert truth.gradients < 1e-5
    assert math.isfinite(truth.gradients)
    found, _, untrained = compare(case)
    assert wrong(found, untrained) == []
    assert again or bool(found.compared) == alike
    if not alike and not again:
        assert "parts" in (found.why_not_compared or "")


def test_a_part_that_is_computed_otherwise_is_found() -> None:
    def noisy(module: Any, x: torch.Tensor) -> Any:
        return torch.nn.functional.dropout(module(x), 0.5)

    case = Case(
        "",
        True,
        lambda on: Net(on, lambda m, x: SameParts.apply(noisy, m, x, 3), False),
        shape=SHAPE,
    )
    found, _, untrained = compare(case)
    assert any(one.startswith("random") for one in wrong(found, untrained))


class CutOff(SameParts):
    """Hands its block what is cut off from its input."""

    @staticmethod
    def forward(ctx: Any, fn: Any, module: Any, x: torch.Tensor, shards: int) -> Any:
        return SameParts.forward(ctx, fn, module, x.detach(), shards)


def _plainly(tiled: Callable[[nn.Module, torch.Tensor], Any]) -> tuple[PlainFunctions, nn.Module]:
    case = Case("", False, lambda on: Net(on, tiled, False), shape=SHAPE)
    model, x = build(case, on=True)
    guard = Guard()
    plain = PlainFunctions(Bypass(guard), guard)
    plain.install()
    try:
        step(case, model, x)
    finally:
        plain.remove()
    assert guard.failure is None
    return plain, model


@pytest.mark.parametrize("name", KINDS)
def test_autograd_differentiates_what_their_forward_computes(name: str) -> None:
    tiled, _ = KINDS[name]
    plain, model = _plainly(tiled)
    assert plain.whole
    assert len(plain.names) == 1
    case = Case("", False, lambda on: Net(on, tiled, False), shape=SHAPE)
    alone, x = build(case, on=False)
    step(case, alone, x)
    for key, one in gradients(alone).items():
        other = gradients(model)[key]
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other)
    assert "apply" in vars(torch.autograd.Function)
    assert not hasattr(torch.no_grad.__enter__, "__wrapped__")


def test_one_that_is_cut_off_from_its_input_is_not_called_plain() -> None:
    plain, _ = _plainly(lambda m, x: CutOff.apply(_run, m, x, 3))
    assert not plain.whole
    assert plain.names == ()
