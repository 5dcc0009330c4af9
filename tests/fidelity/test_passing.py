"""What autograd functions of a script's own make of gradients: wrong ones are named, and right ones
are not called wrong. Gradients of the same net without the function are the truth.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recompute_scan.result.fidelity import Fidelity
from tests.fidelity.cases import Case, D, Mlp, Net
from tests.fidelity.compare import compare, gradients
from tests.fidelity.truth import measure

pytestmark = pytest.mark.filterwarnings("ignore")
# What a backward does with its recompute: gets the function, the input and the gradient.
Backward = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor | None]


def _function(backward_of: Backward, parts: int = 1, parts_again: int | None = None) -> Any:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, fn: Any, x: torch.Tensor) -> Any:
            ctx.fn = fn
            ctx.save_for_backward(x)
            with torch.no_grad():
                return torch.cat([fn(part) for part in x.chunk(parts)])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            number = parts_again or parts
            pairs = zip(x.detach().chunk(number), grads[0].chunk(number), strict=True)
            found = [backward_of(ctx.fn, one.requires_grad_(), grad) for one, grad in pairs]
            torch.autograd.backward([])  # what shows in its code that it runs something backward
            return None, None if found[0] is None else torch.cat(found)  # type: ignore[arg-type]

    return Again


class _WithWeights(torch.autograd.Function):
    """Gets the weights as arguments and returns their gradients, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, fn: Any, x: torch.Tensor, *weights: torch.Tensor) -> Any:
        ctx.fn = fn
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        return None, *torch.autograd.grad(_again(ctx.fn, x), (x, *weights), grads)


def _again(fn: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return fn(x)  # type: ignore[no-any-return]


def _right(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    torch.autograd.backward(_again(fn, x), grad)
    return x.grad


def _twice(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """The weights and the input, one after the other."""
    y, held = _again(fn, x), list(fn.parameters())
    (to_input,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    for weight, one in zip(held, torch.autograd.grad(y, held, grad), strict=True):
        weight.grad = one if weight.grad is None else weight.grad + one
    return to_input


def _scaled(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    with torch.enable_grad():
        y = 2 * fn(x)
    torch.autograd.backward(y, grad)
    return x.grad


def _negated(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    torch.autograd.backward(_again(fn, x), -grad)
    return x.grad


def _first_half(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    half = len(grad) // 2
    with torch.enable_grad():
        y = fn(x)[:half]
    torch.autograd.backward(y, grad[:half])
    return x.grad


def _incoming(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    torch.autograd.backward(_again(fn, x), grad)
    return grad


def _nothing(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    torch.autograd.backward(_again(fn, x), grad)
    return None


def _inputs_alone(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    return torch.autograd.grad(_again(fn, x), x, grad)[0]


def _without_autograd(fn: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    y = fn(x)
    if y.requires_grad:
        torch.autograd.backward(y, grad)
    return grad


@pytest.mark.parametrize(
    ("backward_of", "parts", "why"),
    [
        (_right, 1, None),
        (_right, 4, None),
        (_twice, 1, None),
        (_scaled, 1, "arrives-otherwise"),
        (_scaled, 4, "arrives-otherwise"),
        (_negated, 1, "arrives-otherwise"),
        (_first_half, 1, "arrives-otherwise"),
        (_incoming, 1, "returned-otherwise"),
        (_incoming, 2, "returned-otherwise"),
        (_nothing, 1, "returned-otherwise"),
        (_inputs_alone, 1, "weights-left-out"),
        (_without_autograd, 1, "grad-mode-off"),
    ],
)
def test_what_a_function_makes_of_gradients(
    backward_of: Backward, parts: int, why: str | None
) -> None:
    found, model = _compared(_function(backward_of, parts).apply, wrong=why is not None)
    assert {one.why for region in found.regions for one in region.lost} == ({why} if why else set())
    if why == "weights-left-out":
        without = {name for name, grad in gradients(model).items() if grad is None}
        named = {w for region in found.regions for one in region.lost for w in one.weights}
        assert named == without


@pytest.mark.parametrize("parts", [(1, 4), (2, 8), (4, 2)])
def test_a_backward_in_another_number_of_parts_is_right(parts: tuple[int, int]) -> None:
    found, _ = _compared(_function(_right, *parts).apply, wrong=False)
    assert not [one for region in found.regions for one in region.lost]


def test_weights_that_are_arguments_have_their_own_gradients() -> None:
    found, _ = _compared(lambda fn, x: _WithWeights.apply(fn, x, *fn.parameters()), wrong=False)
    assert not [one for region in found.regions for one in region.lost]


def _compared(call: Callable[..., Any], *, wrong: bool) -> tuple[Fidelity, nn.Module]:
    def build(on: bool) -> nn.Module:
        return Net([Mlp() for _ in range(2)], call if on else lambda layer, x: layer(x))

    case = Case("", wrong, build, shape=(8, D))
    assert (measure(case).gradients > 1e-5) == wrong
    found, model, _ = compare(case)
    return found, model
