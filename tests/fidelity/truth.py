"""Whether a training's checkpoints change it: one step with them and one without, compared."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tests.fidelity.cases import Case


@dataclass(frozen=True)
class Truth:
    """How far gradients and buffers are from those without checkpoints.

    Attributes:
        gradients: Largest relative norm of a parameter's difference; infinite where one is
            missing.
        buffers: Likewise, of the buffers.
        worst: Name of the parameter or buffer that is furthest off; empty where none is.
    """

    gradients: float
    buffers: float
    worst: str

    @property
    def wrong(self) -> bool:
        """Whether more than rounding lies between."""
        return self.gradients > 1e-3 or self.buffers > 1e-3


def seed() -> None:
    """The same random numbers from here on, from every source."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def step(case: Case, model: nn.Module, x: torch.Tensor) -> None:
    """One forward and backward pass."""
    seed()
    with case.around():
        loss = model(x)
    loss.float().backward()


def build(case: Case, on: bool) -> tuple[nn.Module, torch.Tensor]:
    """The case's model in training, and an input for it."""
    seed()
    model = case.build(on)
    return model, torch.randn(case.shape)


def measure(case: Case) -> Truth:
    """The truth of one case."""
    found = []
    for on in (True, False):
        model, x = build(case, on)
        step(case, model, x)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        found.append((gradients, dict(model.named_buffers())))
    (with_, buffers), (without, buffers_without) = found
    apart = {name: distance(grad, without[name]) for name, grad in with_.items()}
    states = {name: distance(one, buffers_without[name]) for name, one in buffers.items()}
    both = apart | states
    worst = max(both, key=lambda name: both[name]) if both else ""
    return Truth(
        max(apart.values(), default=0.0),
        max(states.values(), default=0.0),
        worst if both and both[worst] else "",
    )


def distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Norm of the difference over the other's norm; infinite where one is missing."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if not all(t.is_sparse or t.untyped_storage().nbytes() for t in (one, other)):
        return 0.0  # its memory is given back
    one, other = _numbers(one), _numbers(other)
    norm, apart = float(other.norm()), float((one - other).norm())
    return apart / norm if norm else (float("inf") if apart else 0.0)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double()
