"""How many tensors autograd saves for each operator."""

from __future__ import annotations

import numpy as np

from recompute_scan.arrays import changes
from recompute_scan.model import Calls
from recompute_scan.recompute.roles import OPERATORS, Role, table
from recompute_scan.recompute.vocabulary import COMPILED_CALL
from recompute_scan.trace.columns import Bool, Int8, Int64, Kind

# Tensors that autograd saves for these, from torch's `tools/autograd/derivatives.yaml`: what the
# formulas of an operator's gradients name, where every input needs one. First those of which only
# inputs are saved, which is done before they run.
_INPUTS = {
    1: "_adaptive_avg_pool2d abs avg_pool2d clamp clamp_min cos elu embedding erf gelu glu "
    "hardsigmoid hardswish hardtanh index index_select leaky_relu log masked_fill mish pow "
    "scatter_add silu sin softplus var where",
    2: "_prelu_kernel addcmul addmm atan2 baddbmm binary_cross_entropy_with_logits bmm convolution "
    "div gather index_add maximum minimum mm mse_loss mul smooth_l1_loss xlogy",
    3: "_trilinear",
}
_RESULTS = {
    1: "_log_softmax _softmax exp max min native_dropout reciprocal relu rsqrt sigmoid sqrt tanh "
    "topk",
    2: "amax amin linalg_vector_norm log_sigmoid_forward logsumexp max_pool2d_with_indices prod "
    "std",
    3: "nll_loss_forward",
    4: "native_group_norm",
    5: "_efficient_attention_forward _embedding_bag _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_flash_attention_for_cpu native_layer_norm",
    6: "_scaled_dot_product_efficient_attention miopen_batch_norm native_batch_norm",
    7: "_flash_attention_forward _scaled_dot_product_flash_attention cudnn_batch_norm",
    11: "mkldnn_rnn_layer",
}
_SAVED = {
    name: number
    for kind in (_INPUTS, _RESULTS)
    for number, names in kind.items()
    for name in names.split()
}
_INPUTS_ONLY = frozenset(" ".join(_INPUTS.values()).split())
_RESULTS_ONLY = frozenset(_RESULTS[1].split()) - {"max", "min", "native_dropout", "topk"}
# Of a product, one factor is saved for each gradient, which is a product too.
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "mm"})

# Where a number can be autograd's for a call itself, and not that of a node which ran.
_FORWARD = OPERATORS | table(Role.INNER, Role.RANGE)


def saved_by(calls: Calls, role: Int8) -> Int8:
    """How many tensors autograd saves for each call itself, not for those inside it.

    Some only for a call that made a node: what makes none bears the number of the next that does,
    and what an operator runs for itself bears none. A compiled graph shows no nodes; what is in it
    counts by its name. Of a product whose node ran on the same thread, that node tells how many
    factors were saved: with frozen weights it is one.

    Args:
        calls: All calls.
        role: The :class:`recompute_scan.recompute.roles.Role` of each.
    """
    numbered = (calls.sequence >= 0) & (calls.kind == Kind.OP)
    makers = _by_number(calls, np.flatnonzero(numbered & _FORWARD[role]))
    makers = makers[np.roll(changes(calls.thread[makers], calls.sequence[makers]), -1)]
    saves = calls.inside(calls.named(COMPILED_CALL))
    saves[makers] = True
    of_name = np.array([_SAVED.get(_plain(name), 0) for name in calls.names], np.int8)
    saved: Int8 = of_name[calls.name] * saves
    product = np.array([_plain(name) in _PRODUCTS for name in calls.names], np.bool_)[calls.name]
    inside = role[np.maximum(calls.parent, 0)] == Role.BACKWARD
    nodes = _by_number(calls, np.flatnonzero(numbered & inside & (role == Role.FORMULA)))
    _limit(saved, calls, product, makers[product[makers]], nodes)
    return saved


def saved_before(name: str) -> bool:
    """Is what an operator of this name saves all saved before it computes anything?"""
    return _plain(name) in _INPUTS_ONLY


def saves_result(name: str) -> bool:
    """Does an operator of this name save its one result and nothing else?

    What works with that result next and saves its input saves the same memory.
    """
    return _plain(name) in _RESULTS_ONLY


def _limit(saved: Int8, calls: Calls, product: Bool, made: Int64, nodes: Int64) -> None:
    """Let these products save no more than there are products in the nodes that they made."""
    if not len(nodes):
        return
    both = np.concatenate((nodes, made))
    known, number = np.unique(calls.sequence[both].astype(np.int64), return_inverse=True)
    keys = calls.thread[both].astype(np.int64) * len(known) + number
    key, wanted = keys[: len(nodes)], keys[len(nodes) :]
    at = np.minimum(key.searchsorted(wanted), len(nodes) - 1)
    ran = key[at] == wanted
    made, node = made[ran], nodes[at[ran]]
    before = np.concatenate(((0,), product.cumsum()))
    saved[made] = np.minimum(saved[made], before[node + calls.size[node] + 1] - before[node])


def _by_number(calls: Calls, rows: Int64) -> Int64:
    """These rows, in order, by thread and autograd's number."""
    return rows[np.lexsort((calls.sequence[rows], calls.thread[rows]))]


def _plain(name: str) -> str:
    """An operator that works in place saves what the one does that does not."""
    return name.removeprefix("aten::").removesuffix("_")
