"""What it takes autograd to save a tensor, and a non-reentrant checkpoint to handle it.

A non-reentrant checkpoint keeps a Python hook at every tensor that autograd saves: it runs in
the forward pass (pack), again in the recompute, and when the backward pass asks for the tensor
(unpack) (``torch/utils/checkpoint.py``, ``_checkpoint_hook`` and ``_recomputation_hook``). Where
operators are small this costs as much as the operators, and a trace that has no such checkpoint
around its operators does not show it.
"""

from __future__ import annotations

from msgspec import Struct


class Hooks(Struct, frozen=True):
    """Host time for each saved tensor, and for the end of a recompute, ns.

    Attributes:
        gradient_ns: To record the operator that saves it.
        hook_ns: Each of the three hooks.
        stop_ns: To end one recompute early, by an exception that every frame of it lets through.
    """

    gradient_ns: float
    hook_ns: float
    stop_ns: float


# Between what recordings of two machines ask for; they do not tell the three hooks apart
# (`benchmarks/results/prediction.md`).
TYPICAL = Hooks(gradient_ns=750.0, hook_ns=6500.0, stop_ns=130_000.0)


def scale(hooks: Hooks, factor: float) -> Hooks:
    """The same, each multiplied."""
    return Hooks(
        gradient_ns=factor * hooks.gradient_ns,
        hook_ns=factor * hooks.hook_ns,
        stop_ns=factor * hooks.stop_ns,
    )
