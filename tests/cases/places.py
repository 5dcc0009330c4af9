"""Odd places for a checkpoint: offloading, penalties, shared and mixed blocks, one module."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    offload_wrapper,
)

from .case import Build, Case, TrainingStep, full, none
from .loops import batch, gradient_penalty, ordinary, stepping, updated
from .model import NON_REENTRANT, REENTRANT, Checkpoints, Layer, Model, Oracle, Variant, run
from .versions import non_reentrant_wrapper
from .watch import watch_whole_runs

N, R = NON_REENTRANT, REENTRANT
ONCE = Checkpoints(outer=N)

Offload = Literal["wrapper around checkpoint", "wrapper", "saved around checkpoint", "saved inside"]


class SavedOnCpu(nn.Module):
    """Runs a layer while saved tensors go to host memory."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            result: Tensor = self.layer(x)
        return result


def offload(how: Offload, variant: Variant = N) -> Build:
    """Activations go to host memory, with checkpoints or without."""

    def change(model: Model, oracle: Oracle) -> None:
        if how == "wrapper":
            apply_activation_checkpointing(model, offload_wrapper, lambda m: isinstance(m, Layer))
        elif how == "wrapper around checkpoint":
            apply_activation_checkpointing(
                model,
                lambda layer: offload_wrapper(non_reentrant_wrapper(layer)),
                lambda m: isinstance(m, Layer),
            )
        else:
            model.layers = nn.ModuleList(SavedOnCpu(layer) for layer in model.layers)
            if how == "saved inside":
                model.asked = Checkpoints(outer=variant)

    asked = Checkpoints(inner=variant if how == "saved around checkpoint" else None)
    return stepping(ordinary, asked, change)


def one_linear(variant: Variant) -> Build:
    """In each layer a single linear module is checkpointed; only its whole runs count.

    All that a linear module saves is its input: a non-reentrant recompute of it has nothing to do.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(Oracle()).to(device)
        tokens = batch(device)
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            watch_whole_runs(oracle, layer.mlp.up, f"layers.{number}", "mlp")
            layer.mlp.up = Checkpointed(layer.mlp.up, variant)  # type: ignore[assignment]

        return updated(model.parameters(), lambda: ordinary(model, tokens))

    return build


class Checkpointed(nn.Module):
    """Any module of one input under a checkpoint."""

    def __init__(self, module: nn.Module, variant: Variant) -> None:
        super().__init__()
        self.module = module
        self.variant = variant

    def forward(self, x: Tensor) -> Tensor:
        return run(self.variant, self.module, x)


PLACES = (
    none("offload_none", "Activations go to the host; none is checkpointed.", offload("wrapper")),
    full(
        "offload_round_n", "Offloading around a checkpoint.", offload("wrapper around checkpoint")
    ),
    full(
        "offload_saved_round_n",
        "save_on_cpu around a checkpoint.",
        offload("saved around checkpoint"),
    ),
    full("offload_saved_round_r", "The same, reentrant.", offload("saved around checkpoint", R)),
    none(
        "offload_saved_in_n",
        "save_on_cpu inside a checkpoint takes its tensors first: nothing runs again.",
        offload("saved inside"),
    ),
    full("offload_saved_in_r", "The same, reentrant.", offload("saved inside", R)),
    full(
        "penalty_n",
        "Gradient penalty through checkpoints.",
        gradient_penalty(ONCE),
        backwards_per_forward=2,
    ),
    full(
        "penalty_halves_n",
        "The same, one checkpoint per half.",
        gradient_penalty(Checkpoints(attention=N, mlp=N)),
        backwards_per_forward=2,
    ),
    none(
        "linear_n",
        "One linear module per layer is checkpointed: nothing runs again.",
        one_linear(N),
    ),
    Case("linear_r", "The same, reentrant: the modules are the regions.", None, one_linear(R)),
)
