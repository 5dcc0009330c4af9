"""Megatron-core's selective checkpoint: an output is thrown away and computed again in a hook.

No node asks for what is missing. A hook on a later tensor's gradient runs the function again,
fills the emptied storage, and the function's own node then goes backward through that run.
Written after ``megatron/core/tensor_parallel/random.py`` (``CheckpointWithoutOutput``).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .case import Build, Case, partial
from .loops import ordinary, stepping
from .model import LAYERS, Mlp, Model, Oracle


class CheckpointWithoutOutputFunction(torch.autograd.Function):
    """Runs the function without gradients; goes backward through the run that the hook made."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], held: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            result = function(x)
        ctx.held = held
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None]:
        torch.autograd.backward(ctx.held.output, grad)
        return None, None, ctx.held.input.grad


class Discarding:
    """One checkpointed call whose output is thrown away."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function = function
        self.input = x.detach().requires_grad_()
        self.output: Tensor | None = None
        self.given: Tensor = CheckpointWithoutOutputFunction.apply(function, self, x)
        self._size = self.given.untyped_storage().size()

    def discard(self, later: Tensor) -> None:
        """Empty the output; it comes back when the gradient of ``later`` is there."""
        self.given.untyped_storage().resize_(0)
        later.register_hook(self._run_again)

    def _run_again(self, _: Tensor) -> None:
        with torch.enable_grad():
            self.output = self.function(self.input)
        self.given.untyped_storage().resize_(self._size)
        with torch.no_grad():
            self.given.untyped_storage().copy_(self.output.untyped_storage())


class DiscardingMlp(Mlp):
    """The MLP half; all before its last product is thrown away and computed again."""

    discarding: Any = Discarding

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.discarding(self.hidden, x)
        result: Tensor = self.down(hidden.given)
        hidden.discard(result)
        return x + result

    def hidden(self, x: Tensor) -> Tensor:
        self.oracle.enter(self.layer, "mlp", self.training)
        return F.gelu(self.up(self.norm(x)))


def discarded(layers: range, mlp: type[DiscardingMlp] = DiscardingMlp) -> Build:
    """The ordinary step, with such MLP halves in these layers."""

    def change(model: Model, oracle: Oracle) -> None:
        for number in layers:
            model.layers[number].mlp = mlp(oracle, f"layers.{number}")

    return stepping(ordinary, change=change)


DISCARDED = (
    Case(
        "discarded_mlp",
        "Each MLP half is run again by a hook: the halves are the regions.",
        None,
        discarded(range(LAYERS)),
    ),
    partial("discarded_mlp_some", "The same in two layers of four.", discarded(range(1, 3))),
)
