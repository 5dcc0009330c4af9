"""More functions that run their block again: other ways to write one, and several in one model."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .case import Build, TrainingStep, doubled, full, partial
from .frameworks import Function, Under, layered, under
from .functions import named, parameters_of, passing_parameters, plain, torchs
from .loops import batch, next_token_loss
from .model import NON_REENTRANT, REENTRANT, Model, Oracle, run


class _SetsUpItsContext(torch.autograd.Function):
    """In the newer style, with a context set up apart from the forward pass."""

    @staticmethod
    def forward(function: Function, x: Tensor) -> Tensor:
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, x = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.set_grad_enabled(True):
            output = ctx.function(x)
        output.backward(gradient)
        return None, x.grad


class _TakesTheGradient(torch.autograd.Function):
    """Its second run goes on into a product, whose backward pass it starts."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autograd.graph.save_on_cpu(pin_memory=False):
            output = ctx.function(x)
            product = (output * gradient).sum()
        product.backward()
        return None, x.grad


class _CastsBeforeAndAfter(torch.autograd.Function):
    """Keeps its input in half precision, and runs again what it brought back."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x.to(torch.bfloat16))
        with torch.inference_mode(False):
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].float().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
            torch.autograd.backward([output], [gradient])
        return None, x.grad


class _InTiles(torch.autograd.Function):
    """Runs its block on one part of the batch after the other, and again, each with its backward
    pass, as DeepSpeed's TiledMLP does.
    """

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([function(part) for part in x.split(1)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = torch.empty_like(x)
        for n in range(len(x)):
            part = x[n : n + 1].detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.function(part)
            torch.autograd.backward(output, gradient[n : n + 1])
            found[n : n + 1] = part.grad
        return None, found


class _ReturnsMany(torch.autograd.Function):
    """Takes and returns several tensors; parameters are found by itself."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor, y: Tensor, *rest: Tensor) -> Any:
        ctx.function, ctx.rest = function, rest
        ctx.save_for_backward(x, y)
        with torch.no_grad():
            return function(x), y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = (z.detach().requires_grad_() for z in ctx.saved_tensors)
        with torch.enable_grad():
            outputs = ctx.function(x), y.clone()
        found = torch.autograd.grad(outputs, (x, y, *ctx.rest), gradients, allow_unused=True)
        return (None, *found)


def _many(name: str) -> Under:
    kind = named(name, _ReturnsMany)

    def checkpoint(function: Function) -> Function:
        rest = parameters_of(function)

        def call(x: Tensor) -> Tensor:
            result, other = kind.apply(function, x, x, *rest)
            total: Tensor = result + 0.0 * other
            return total

        return call

    return checkpoint


def some_layers(own: Under, every: int) -> Build:
    """Every n-th layer alone is under the function."""
    return layered(
        lambda layers: [one if at % every else own(one) for at, one in enumerate(layers)]
    )


def two_kinds() -> Build:
    """Two models of one class in one step: one checkpointed twice, the other once."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        first, second = (
            Model(oracle, prefix=name).to(device) for name in ("generator.", "discriminator.")
        )
        twice = [passing_parameters("Keeper")(layer) for layer in first.layers]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in (first, second)]
        tokens = batch(device)

        def step() -> None:
            for model, optimizer in zip((first, second), optimizers, strict=True):
                x: Tensor = model.embedding(tokens)
                for own, layer in zip(twice, model.layers, strict=True):
                    function = own if model is first else layer
                    x = run(REENTRANT if model is first else NON_REENTRANT, function, x)
                next_token_loss(model.logits(x), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

        return step

    return build


_CONTEXT = plain("LeanLayer", _SetsUpItsContext)
_PRODUCT = plain("Product", _TakesTheGradient)
HALF_KEPT = plain("HalfKept", _CastsBeforeAndAfter)
TILES = plain("InTiles", _InTiles)

MORE_FUNCTIONS = (
    full("lean", "In the newer style.", under(_CONTEXT)),
    doubled("lean_twice", "Round itself.", under(_CONTEXT, _CONTEXT)),
    full("product", "Its second run goes on into a product.", under(_PRODUCT)),
    full("half_kept", "Its second run has other inputs' types before.", under(HALF_KEPT)),
    full("many", "Several tensors in and out.", under(_many("SeveralKept"))),
    doubled(
        "two_names",
        "Two functions, one in the other.",
        under(_PRODUCT, passing_parameters("InnerKeeper")),
    ),
    full("tiles_in_r", "In tiles.", under(torchs(REENTRANT), TILES), by_design=1),
    full("tiles_in_n", "The other.", under(torchs(NON_REENTRANT), TILES), by_design=1),
    partial("every_second", "Every second layer.", some_layers(_CONTEXT, 2)),
    doubled("two_kinds", "Two models of one class: 2 and 1.", two_kinds()),
)
