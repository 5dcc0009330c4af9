"""Gradient hooks that run modules inside the backward pass: no checkpoint, no recompute."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from .case import Build, Case, TrainingStep, full, none
from .loops import batch, ordinary, updated
from .model import NON_REENTRANT, REENTRANT, Checkpoints, Model, Oracle
from .watch import unwatched

N, R = NON_REENTRANT, REENTRANT
ONCE = Checkpoints(outer=N)

Where = Literal["output", "parameter", "module"]


def hook_runs_a_layer(
    asked: Checkpoints | None = None,
    *,
    where: Where = "output",
    gradients: bool = False,
    same: bool = False,
) -> Build:
    """A gradient hook runs a layer, as probes and loggers of features do.

    Args:
        asked: Checkpoints of the trained model.
        where: Hooked on each layer's output, on a parameter of each layer when its gradient
            has been added, or on the module.
        gradients: The hook's run records a graph.
        same: It runs the very layer that it hangs on, on the input that this had; else a layer
            of the same shape that is no part of the model.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked).to(device)
        stranger = Model(oracle, prefix="stranger.").layers[0].to(device)
        tokens = batch(device)
        inputs: dict[nn.Module, Tensor] = {}

        def probe(layer: nn.Module) -> None:
            with unwatched(oracle), torch.set_grad_enabled(gradients):
                attention, mlp = (layer if same else stranger).children()
                mlp(attention(inputs[layer])).mean()

        for layer in model.layers:
            _hang_on(layer, where, probe, inputs)

        return updated(model.parameters(), lambda: ordinary(model, tokens))

    return build


def _hang_on(
    layer: nn.Module,
    where: Where,
    probe: Callable[[nn.Module], None],
    inputs: dict[nn.Module, Tensor],
) -> None:
    def keep_input(module: nn.Module, args: tuple[Tensor]) -> None:
        if torch._C._current_graph_task_id() == -1:
            inputs[module] = args[0].detach()

    def hook_output(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad and torch._C._current_graph_task_id() == -1:
            output.register_hook(lambda grad: probe(module))

    layer.register_forward_pre_hook(keep_input)
    if where == "output":
        layer.register_forward_hook(hook_output)
    elif where == "module":
        layer.register_full_backward_hook(lambda module, before, after: probe(module))
    else:
        weight = layer.get_parameter("mlp.up.weight")
        weight.register_post_accumulate_grad_hook(lambda parameter: probe(layer))


def _hook_cases() -> tuple[Case, ...]:
    cases = []
    places: tuple[Where, ...] = ("output", "parameter", "module")
    for where in places:
        for gradients in (False, True):
            for same in (False, True):
                what = "its own layer" if same else "another layer"
                cases.append(
                    none(
                        f"hook_{where}{'_grad' if gradients else ''}{'_same' if same else ''}",
                        f"A hook on each {where} runs {what} in the backward pass.",
                        hook_runs_a_layer(where=where, gradients=gradients, same=same),
                    )
                )
    return tuple(cases)


HOOKS = (
    *_hook_cases(),
    full(
        "hook_output_once",
        "A hook runs another layer; the model is checkpointed once.",
        hook_runs_a_layer(ONCE),
    ),
    full(
        "hook_output_grad_same_once",
        "A hook runs its own layer with gradients on; the model is checkpointed once.",
        hook_runs_a_layer(ONCE, gradients=True, same=True),
    ),
    full(
        "hook_parameter_grad_same_r",
        "The same on a parameter, reentrant.",
        hook_runs_a_layer(Checkpoints(outer=R), where="parameter", gradients=True, same=True),
    ),
)
