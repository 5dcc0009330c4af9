"""What it takes autograd to save a tensor, and a non-reentrant checkpoint to handle it.

A non-reentrant checkpoint keeps a Python hook at every tensor that autograd saves: it runs in
the forward pass (pack), again in the recompute, and when the backward pass asks for the tensor
(unpack) (``torch/utils/checkpoint.py``, ``_checkpoint_hook`` and ``_recomputation_hook``). Where
operators are small this costs as much as the operators, and a trace that has no such checkpoint
around its operators does not show it.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.model import Calls
from recompute_scan.recompute.vocabulary import COMPILED_CALL
from recompute_scan.trace.columns import Int32, Int64


class Hooks(Struct, frozen=True):
    """Host time for each saved tensor, and for the end of a recompute, ns.

    Attributes:
        gradient_ns: To record the operator that saves it.
        pack_ns: The hook in the forward pass.
        repack_ns: The hook in a recompute.
        unpack_ns: The hook in the backward pass.
        stop_ns: To end one recompute early, by an exception that every frame of it lets through.
    """

    gradient_ns: float
    pack_ns: float
    repack_ns: float
    unpack_ns: float
    stop_ns: float


# Near what least squares over 57 recordings give (`docs/prediction.md`).
TYPICAL = Hooks(
    gradient_ns=750.0, pack_ns=7000.0, repack_ns=7000.0, unpack_ns=8500.0, stop_ns=130_000.0
)

# Tensors that autograd saves for these, from torch's `tools/autograd/derivatives.yaml`: what the
# formulas of an operator's gradients name, where every input needs one.
_SAVED = {
    "_efficient_attention_forward": 5,
    "_flash_attention_forward": 7,
    "_log_softmax": 1,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_flash_attention": 7,
    "_scaled_dot_product_flash_attention_for_cpu": 5,
    "_softmax": 1,
    "_to_copy": 0,
    "addmm": 2,
    "baddbmm": 2,
    "bmm": 2,
    "clamp": 1,
    "convolution": 2,
    "cos": 1,
    "cudnn_batch_norm": 7,
    "div": 2,
    "embedding": 1,
    "erf": 1,
    "exp": 1,
    "gelu": 1,
    "leaky_relu": 1,
    "log": 1,
    "max_pool2d_with_indices": 2,
    "miopen_batch_norm": 6,
    "mm": 2,
    "mul": 2,
    "native_batch_norm": 6,
    "native_dropout": 1,
    "native_group_norm": 4,
    "native_layer_norm": 5,
    "nll_loss_forward": 4,
    "pow": 1,
    "relu": 1,
    "rsqrt": 1,
    "sigmoid": 1,
    "silu": 1,
    "sin": 1,
    "sqrt": 1,
    "tanh": 1,
    "where": 1,
}

# Of these only inputs are saved, and an operator's inputs are saved before it runs.
_INPUTS_ONLY = frozenset(
    {
        *("addmm", "baddbmm", "bmm", "clamp", "convolution", "cos", "div", "embedding", "erf"),
        *("gelu", "leaky_relu", "log", "mm", "mul", "pow", "silu", "sin", "where"),
    }
)


def scale(hooks: Hooks, factor: float) -> Hooks:
    """The same, each multiplied."""
    return Hooks(
        gradient_ns=factor * hooks.gradient_ns,
        pack_ns=factor * hooks.pack_ns,
        repack_ns=factor * hooks.repack_ns,
        unpack_ns=factor * hooks.unpack_ns,
        stop_ns=factor * hooks.stop_ns,
    )


def saved_tensors(calls: Calls) -> Int32:
    """For each call: how many tensors autograd saves for it and all inside it."""
    of_name = np.array([_SAVED.get(name.removeprefix("aten::"), 0) for name in calls.names], int)
    before = np.zeros(len(calls) + 1, np.int32)
    np.cumsum(of_name.astype(np.int8)[calls.name], out=before[1:])
    behind = np.arange(1, len(calls) + 1, dtype=np.int32)
    behind += calls.size
    saved: Int32 = before[behind]
    saved -= before[:-1]
    return saved


def find_stop(calls: Calls, rows: Int64) -> int | None:
    """When early stop ends a run of these operators, ns; ``None`` where none saves a tensor.

    A non-reentrant recompute ends at the last tensor that its first run saved
    (``torch/utils/checkpoint.py``, ``_StopRecomputationError``): in front of an operator of which
    only inputs are saved, else behind it. A compiled graph runs as a whole.

    Args:
        calls: All calls.
        rows: The operators of one run, in order.
    """
    for row in rows[::-1].tolist():
        for inner in range(row + int(calls.size[row]), row - 1, -1):
            name = calls.names[calls.name[inner]].removeprefix("aten::")
            if _SAVED.get(name):
                graph = _compiled_around(calls, row)
                if graph >= 0:
                    return int(calls.end[graph])
                return int((calls.start if name in _INPUTS_ONLY else calls.end)[inner])
    return None


def _compiled_around(calls: Calls, row: int) -> int:
    """Row of the compiled graph around this call, which saves tensors at its end; or -1."""
    while row >= 0 and not COMPILED_CALL.match(calls.names[calls.name[row]]):
        row = int(calls.parent[row])
    return row
