"""What autograd and a checkpoint's hooks take for each operator that ran without gradients before.

Most operators do the same either way, and autograd's record comes on top. Their own times differ
less for that than for caches and memory between one place and another, so a typical time is added
for what they save. Some operators take another way: with gradients, a recurrent layer copies what
its own steps would overwrite, and an encoder layer is not one fused call. Those take the time of
their run with gradients.

How many tensors autograd saves for each operator.

What it takes autograd to save a tensor, and a non-reentrant checkpoint to handle it.

A non-reentrant checkpoint keeps a Python hook at every tensor that autograd saves: it runs in
the forward pass (pack), again in the recompute, and when the backward pass asks for the tensor
(unpack) (``torch/utils/checkpoint.py``, ``_checkpoint_hook`` and ``_recomputation_hook``). Where
operators are small this costs as much as the operators, and a trace that has no such checkpoint
around its operators does not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.cost.clock import TimeEdit
from recompute_scan.cost.phases import Float64
from recompute_scan.cost.reruns import OpSequence, with_gradients
from recompute_scan.numpy_tools import changes
from recompute_scan.recompute.roles import OPERATORS, Role, table
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.recompute.vocabulary import COMPILED_CALL, NEUTRAL
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Kind

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
    3: "_fused_rms_norm nll_loss_forward",
    4: "native_group_norm",
    5: "_efficient_attention_forward _embedding_bag _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_flash_attention_for_cpu native_layer_norm",
    6: "_scaled_dot_product_efficient_attention miopen_batch_norm native_batch_norm",
    7: "_flash_attention_forward _scaled_dot_product_flash_attention cudnn_batch_norm",
    # Of one layer in one direction: `weight` is a list of four.
    9: "_cudnn_rnn miopen_rnn",
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
    counts by its name. An operator that others wrote, or a function of a script's own, is taken to
    save one: what it really saves is not in a trace. Of a product whose node ran on the same
    thread, that node tells how many factors were saved: with frozen weights it is one.

    Args:
        calls: All calls.
        role: The :class:`recompute_scan.recompute.roles.Role` of each.
    """
    numbered = (calls.sequence >= 0) & (calls.kind == Kind.OP)
    makers = _by_number(calls, np.flatnonzero(numbered & _FORWARD[role]))
    makers = makers[np.roll(changes(calls.thread[makers], calls.sequence[makers]), -1)]
    saves = calls.inside(calls.named(COMPILED_CALL))
    saves[makers] = True
    of_name = np.array([_saved(name) for name in calls.names], np.int8)
    saved: Int8 = of_name[calls.name] * saves
    product = np.array([_plain(name) in _PRODUCTS for name in calls.names], np.bool_)[calls.name]
    inside = role[np.maximum(calls.parent, 0)] == Role.BACKWARD
    nodes = _by_number(calls, np.flatnonzero(numbered & inside & (role == Role.FORMULA)))
    _limit(saved, calls, product, makers[product[makers]], nodes)
    return saved


def _saved(name: str) -> int:
    ours = name.startswith("aten::") or _plain(name) in _SAVED
    return _SAVED.get(_plain(name), 0) if ours else 1


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


# How long each of these calls takes, ns, without the profiler.
Lengths = Callable[[Int64], Float64]
# An edit that depends on what hooks take, and calls.
HookedEdit = Callable[[Hooks, Lengths], TimeEdit]


class Recording(Struct, frozen=True):
    """A run of operators as autograd records it.

    Attributes:
        like: For each operator, the row of a run with gradients; its own where there is none.
        saved: How many tensors are saved.
        measured: How many of them by operators whose time with gradients is known: they had them
            in this run, or take another way.
        others: Rows of those that take another way, as they are.
        instead: The same with gradients.
    """

    like: Int64
    saved: int
    measured: int
    others: Int64
    instead: Int64

    def more(self, hooks: Hooks, lengths: Lengths) -> float:
        """How much longer it takes than the run as it is, ns; 0 where that had gradients."""
        way = float(lengths(self.instead).sum() - lengths(self.others).sum())
        return way + hooks.gradient_ns * (self.saved - self.measured)


class Recordings:
    """The runs with gradients in a trace.

    Args:
        facts: What ran again.
        sequences: The recomputes that matter.
    """

    def __init__(self, facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> None:
        calls = facts.calls
        self._facts = facts
        self._saves = saved_by(calls, facts.structure.role)
        self._saved = _with_all_inside(calls, self._saves)
        neutral = calls.matching(NEUTRAL)[calls.name]
        self._counts = (calls.kind == Kind.OP) & ~neutral
        # A number for what each operator consists of.
        of_name = np.array([crc32(name.encode()) for name in calls.names], np.int64)
        self._way = _with_all_inside(calls, np.where(self._counts, of_name[calls.name], 0))
        # For each operator of the forward pass: the row of its first run again with gradients.
        self._run: Int32 = np.full(len(facts.calls), -1, np.int32)
        for sequence in reversed(sequences):
            recompute = facts.alignment.recomputes[sequence.recompute]
            again = recompute.again[sequence.first : sequence.stop]
            if with_gradients(facts, again):
                self._run[recompute.original[sequence.first : sequence.stop]] = again

    def of(self, rows: Int64, originals: Int64) -> Recording:
        """A run with gradients, whether or not it had them.

        Args:
            rows: Its operators.
            originals: Their first run, which may be this one.
        """
        if with_gradients(self._facts, rows):
            number = int(self._saved[rows].sum())
            return Recording(rows, number, number, rows[:0], rows[:0])
        run = self._run[originals].astype(np.int64)
        like = np.where(run >= 0, run, rows)
        another = self._way[rows] != self._way[like]
        saved = self._saved[like]
        measured = int(saved[another].sum())
        return Recording(like, int(saved.sum()), measured, rows[another], like[another])

    def stop(self, rows: Int64, recording: Recording) -> int | None:
        """When early stop ends a run of these operators, ns; ``None`` where none saves a tensor.

        A non-reentrant recompute ends at the last tensor that its first run saved
        (``torch/utils/checkpoint.py``, ``_StopRecomputationError``): in front of an operator of
        which only inputs are saved, else behind it. A compiled graph runs as a whole, and so does
        here what takes another way with gradients.
        """
        calls, saving = self._facts.calls, np.flatnonzero(self._saved[recording.like] > 0)
        if not len(saving):
            return None
        row, like = int(rows[saving[-1]]), int(recording.like[saving[-1]])
        graph = _compiled_around(calls, row)
        ours, theirs = self._operators(row), self._operators(like)
        last = np.flatnonzero(self._saves[theirs] > 0)[-1:]
        same = self._way[row] == self._way[like] and len(ours) == len(theirs)
        if graph >= 0 or not same or not len(last):
            return int(calls.end[row if graph < 0 else graph])
        inside = int(ours[last[0]])
        name = calls.names[calls.name[inside]]
        return int((calls.start if saved_before(name) else calls.end)[inside])

    def unevenness(self) -> float:
        """How differently the same operators take in one place and another, as a share.

        Between their first run and a run again that goes the same way: caches, memory to allocate,
        clocks. A prediction that takes one run out and leaves the other cannot know which of the
        two times will stay.
        """
        time, alignment = self._facts.work.time, self._facts.alignment
        same = alignment.ran & (self._way[alignment.original] == self._way[alignment.again])
        before = float(time[alignment.original[same]].sum())
        after = float(time[alignment.again[same]].sum())
        return abs(after - before) / max(after, before) if before and after else 0.0

    def _operators(self, row: int) -> Int64:
        """Rows of an operator and all in it that does something."""
        return row + np.flatnonzero(self._counts[row : row + int(self._facts.calls.size[row]) + 1])


def _compiled_around(calls: Calls, row: int) -> int:
    """Row of the compiled graph around this call, which saves tensors at its end; or -1."""
    while row >= 0 and not COMPILED_CALL.match(calls.names[calls.name[row]]):
        row = int(calls.parent[row])
    return row


def _with_all_inside(calls: Calls, values: npt.NDArray[np.integer[Any]]) -> Int64:
    """For each call the sum over it and all inside it, which overflows where it has to."""
    before = np.zeros(len(calls) + 1, np.int64)
    np.cumsum(values, out=before[1:])
    return np.asarray(before[np.arange(1, len(calls) + 1) + calls.size] - before[:-1])
