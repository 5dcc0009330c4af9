"""Every run of every forward operator again, and what differs between one run and another.

Operators run again in a recompute, for one of the checkpoints around them. Three things make a run
longer or shorter than another run of the same operators:

* Autograd records it. Most operators do the same either way, and autograd's record comes on top.
  Their times differ less for that than for caches and memory between one place and another, so a
  typical time is added for each saved tensor. Some operators take another way: with gradients, a
  recurrent layer copies what its steps would overwrite, and an encoder layer is not one fused call.
  These take the time of their run with gradients.
* A non-reentrant checkpoint keeps a Python hook at every tensor that autograd saves. The hook runs
  in the forward pass (pack), again in the recompute, and when the backward pass asks for the tensor
  (unpack; ``torch/utils/checkpoint.py``, ``_checkpoint_hook`` and ``_recomputation_hook``). With
  small operators the hooks cost as much as the operators, and a trace without such a checkpoint
  does not show them.
* A checkpoint function of a library does more than run its block. An offloading function copies its
  input in the forward pass, and back before it runs the block again. Autograd is off then, so
  copies have no sequence number in the recompute; the block's operators have one, with or without a
  wanted gradient (``aten/src/ATen/core/dispatch/Dispatcher.cpp``). FSDP gathers parameters without
  autograd too, but parameters are of another size than the block's input. A function may also go
  backward through its second run more than once, as for the gradient of its input and then for the
  gradients of its parameters: a node that it evaluates twice runs once without it. And it may hold
  on to the gradient that it returns. Where that gradient is added to a leaf, autograd copies what
  it would have taken (``torch/csrc/autograd/functions/accumulate_grad.h``).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

import numpy as np
from msgspec import Struct

from recompute_scan.cost.flops import parse_inputs
from recompute_scan.numpy_tools import changes
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.by_design import OwnWork, find_own_work, first_of_block, is_of_others
from recompute_scan.recompute.roles import OPERATORS, Role, Structure, roles_in
from recompute_scan.recompute.sequences import Recompute
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Checkpoint
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Float64, Int8, Int32, Int64, Kind

# How many operators at the end of a block early stop leaves out at most: what follows the last
# operator with a saved input, such as the addition of a residual.
_LEFT_OUT = 2

# Of the checkpoints around a block, outermost first, the one that stays; None for none.
Keep = Callable[[Sequence[Checkpoint]], Checkpoint | None]


class OpSequence(Struct, frozen=True):
    """Operators of one recompute, in a row, that belong to the same block, or part of one.

    Attributes:
        recompute: Position in ``Alignment.recomputes``.
        first: Position of the first operator in that recompute.
        stop: Position behind the last.
        checkpoints: The checkpoints around their block, outermost first; empty where unknown.
        run: Which run again it is, from 0.
        runs: How many runs again these operators have.
        again: Rows of the operators in this recompute.
        originals: Rows of the same operators in the forward pass.
    """

    recompute: int
    first: int
    stop: int
    checkpoints: tuple[Checkpoint, ...]
    run: int
    runs: int
    again: Int64
    originals: Int64


def find_sequences(facts: RecomputeFacts, here: Bool) -> list[OpSequence]:
    """Recomputes, cut where the block's checkpoints or the number of runs change.

    A recompute counts if its first or last operator is ``here``, in it or in the forward pass.
    """
    alignment = facts.alignment
    edges = np.append(alignment.begins, len(alignment.again))
    ends = np.concatenate([edges[:-1], edges[1:] - 1]).reshape(2, -1)
    touched = here[alignment.again[ends]].any(axis=0) | here[alignment.original[ends]].any(axis=0)
    touched &= ~np.array([each.by_design for each in alignment.recomputes], np.bool_)
    stacks: dict[tuple[Checkpoint, ...], int] = {(): 0}
    stack = np.zeros(len(alignment.forward), np.int64)
    block = np.full(len(alignment.forward), -1, np.int64)
    parts = (one for each in facts.blocks for one in (each, *each.parts))
    for number, one in enumerate(parts):
        stack[one.places] = stacks.setdefault(one.checkpoints, len(stacks))
        block[one.places] = number
    kinds = list(stacks)
    chosen = {
        number: alignment.places[edges[number] : edges[number + 1]]
        for number in np.flatnonzero(touched).tolist()
    }
    seen, runs = np.zeros((2, len(alignment.forward)), np.int64)
    for places in chosen.values():
        np.add.at(runs, places, 1)
    runs = runs // alignment.passes
    found = []
    for number, places in chosen.items():
        whole = alignment.recomputes[number]
        run = seen[places] % np.maximum(runs[places], 1)
        seen[places] += 1
        for first, stop in _pieces(block[places], runs[places] * (run.max() + 1) + run):
            place = places[first]
            checkpoints = kinds[stack[place]]
            turn = int(run[first]), int(runs[place])
            again, originals = whole.again[first:stop], whole.original[first:stop]
            found.append(OpSequence(number, first, stop, checkpoints, *turn, again, originals))
    return found


def find_reaches(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> list[tuple[int, int]]:
    """For each piece: places in its recompute from which and up to which all goes with it.

    The work of a function before or behind its block goes with the block. Such a piece has no reach
    itself: both places are 0.
    """
    known = [one for one in sequences if one.checkpoints]
    begins = {one.recompute: one.first for one in reversed(known)}
    ends = {one.recompute: one.stop for one in known}
    found = []
    for one in sequences:
        again = facts.alignment.recomputes[one.recompute].again
        begin, end = begins.get(one.recompute, 0), ends.get(one.recompute, len(again))
        if end < len(again) and facts.structure.function[again[end]] < 0:
            end = len(again)
        if one.stop <= begin or one.first >= end:
            found.append((0, 0))
            continue
        first = 0 if one.first <= begin else one.first
        found.append((first, len(again) if one.stop == end else one.stop))
    return found


def _pieces(block: Int64, kind: Int64) -> Iterator[tuple[int, int]]:
    """Cuts where the block changes, and inside a block where the kind does for more than a few.

    Early stop leaves out the last operators of a recompute, so these run less often than the rest
    of their block without belonging to another checkpoint.
    """
    first = 0
    cuts = np.flatnonzero(changes(block, kind))[1:]
    for cut, following in itertools.pairwise([*cuts.tolist(), len(block)]):
        short = following - cut <= _LEFT_OUT and block[cut] == block[first]
        if not short:
            yield first, cut
            first = cut
    yield first, len(block)


def with_gradients(facts: RecomputeFacts, rows: Int64) -> bool:
    """Did autograd record most of these operators? Then they carry its numbers."""
    return bool(np.count_nonzero(facts.structure.number[rows] >= 0) * 2 > len(rows))


# Tensors that autograd saves for these operators, from torch's `tools/autograd/derivatives.yaml`:
# the names in the formulas of their gradients, where every input needs one. First the operators
# that save inputs alone, before they run.
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

# Operators that can bear autograd's number for themselves, and not the number of a node that ran.
_FORWARD = OPERATORS | roles_in(Role.INNER, Role.RANGE)


def saved_by(calls: Calls, role: Int8) -> Int8:
    """How many tensors autograd saves for each call itself, without the calls inside it.

    Some operators save only in a call that made a node: another call bears the number of the next
    one that does, and a call that an operator makes for itself bears no number. A compiled graph
    shows no nodes, so its operators count by name. An operator of a library, or a function of the
    script, is taken to save one tensor: the trace does not show how many. The node of a product
    shows how many factors were saved, where it ran on the same thread: one with frozen weights.
    """
    numbered = (calls.sequence >= 0) & (calls.kind == Kind.OP)
    makers = _by_number(calls, np.flatnonzero(numbered & _FORWARD[role]))
    makers = makers[np.roll(changes(calls.thread[makers], calls.sequence[makers]), -1)]
    saves = calls.inside(calls.named(vocabulary.COMPILED_CALL))
    saves[makers] = True
    of_name = np.array([_saved(name) for name in calls.names], np.int8)
    saved: Int8 = of_name[calls.name] * saves
    product = calls.where(lambda name: _plain(name) in _PRODUCTS)
    inside = role[np.maximum(calls.parent, 0)] == Role.BACKWARD
    nodes = _by_number(calls, np.flatnonzero(numbered & inside & (role == Role.FORMULA)))
    _limit(saved, calls, product, makers[product[makers]], nodes)
    return saved


def _saved(name: str) -> int:
    ours = name.startswith("aten::") or _plain(name) in _SAVED
    return _SAVED.get(_plain(name), 0) if ours else 1


def saves_result(name: str) -> bool:
    """Does an operator of this name save its one result and nothing else?

    The next operator shares that memory if it saves its input.
    """
    return _plain(name) in _RESULTS_ONLY


def _limit(saved: Int8, calls: Calls, product: Bool, made: Int64, nodes: Int64) -> None:
    """Let these products save no more tensors than their nodes have products."""
    if not len(nodes):
        return
    both = np.concatenate((nodes, made))
    known, number = np.unique(calls.sequence[both].astype(np.int64), return_inverse=True)
    keys = calls.thread[both].astype(np.int64) * len(known) + number
    key, wanted = keys[: len(nodes)], keys[len(nodes) :]
    at = np.minimum(key.searchsorted(wanted), len(nodes) - 1)
    ran = key[at] == wanted
    made, node = made[ran], nodes[at[ran]]
    saved[made] = np.minimum(saved[made], calls.sums(product, node))


def _by_number(calls: Calls, rows: Int64) -> Int64:
    """These rows, in order, by thread and autograd's number."""
    return rows[np.lexsort((calls.sequence[rows], calls.thread[rows]))]


def _plain(name: str) -> str:
    """The name without the suffix of an operator in place, which saves the same tensors."""
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

    def scaled(self, factor: float) -> Hooks:
        """The same, each multiplied."""
        return Hooks(factor * self.gradient_ns, factor * self.hook_ns, factor * self.stop_ns)


# Between the times that recordings of two machines ask for; these do not separate the three hooks
# (`benchmarks/results/prediction.md`).
TYPICAL = Hooks(gradient_ns=750.0, hook_ns=6500.0, stop_ns=130_000.0)

# How long each of these calls takes, ns, without the profiler.
Lengths = Callable[[Int64], Float64]


class Recording(Struct, frozen=True):
    """A run of operators as autograd records it.

    Attributes:
        like: For each operator, the row of a run with gradients; its own where there is none.
        saved: How many tensors are saved.
        measured: How many of them by operators with a known time with gradients: they had
            gradients in this run, or take another way.
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
    """The runs with gradients in a trace."""

    def __init__(self, facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> None:
        calls = facts.calls
        self._facts = facts
        self._saves = saved_by(calls, facts.structure.role)
        every = np.arange(len(calls))
        self._saved = calls.sums(self._saves, every)
        neutral = calls.where(vocabulary.NEUTRAL.match)
        self._counts = (calls.kind == Kind.OP) & ~neutral
        # A number for what each operator consists of.
        of_name = np.array([crc32(name.encode()) for name in calls.names], np.int64)
        self._way = calls.sums(np.where(self._counts, of_name[calls.name], 0), every)
        # For each operator of the forward pass: the row of its first run again with gradients.
        self._run: Int32 = np.full(len(facts.calls), -1, np.int32)
        for sequence in reversed(sequences):
            again = sequence.again
            if with_gradients(facts, again):
                self._run[sequence.originals] = again

    def of(self, rows: Int64, originals: Int64) -> Recording:
        """A run with gradients, whether or not it had them; it may be the first run itself."""
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
        (``torch/utils/checkpoint.py``, ``_StopRecomputationError``): in front of an operator that
        saves inputs alone, else behind it. A compiled graph runs as a whole; an operator that takes
        another way with gradients is taken to do so too.
        """
        calls, saving = self._facts.calls, np.flatnonzero(self._saved[recording.like] > 0)
        if not len(saving):
            return None
        row, like = int(rows[saving[-1]]), int(recording.like[saving[-1]])
        # A compiled graph around this call saves tensors at its end.
        graphs = vocabulary.COMPILED_CALL.match
        around = (row, *calls.above(row))
        graph = next((one for one in around if graphs(calls.called(one))), -1)
        ours, theirs = self._operators(row), self._operators(like)
        last = np.flatnonzero(self._saves[theirs] > 0)[-1:]
        same = self._way[row] == self._way[like] and len(ours) == len(theirs)
        if graph >= 0 or not same or not len(last):
            return int(calls.end[row if graph < 0 else graph])
        inside = int(ours[last[0]])
        before = _plain(calls.called(inside)) in _INPUTS_ONLY
        return int((calls.start if before else calls.end)[inside])

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


_COPY = re.compile(r"aten::(clone|contiguous|to|_to_copy|copy_)$")


def find_own_copies(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> OwnWork:
    """The copies that recomputes begin with, and the functions' work in the forward pass and in all
    recomputes, by the position of their block's piece among the sequences.
    """
    alignment, structure = facts.alignment, facts.structure
    own = find_own_work(alignment)
    ran = np.bincount(own.owner, minlength=len(alignment.recomputes))
    copies = structure.rows(Role.OWN_WORK)
    copies = copies[facts.calls.names_where(_COPY.match)[facts.calls.name[copies]]]
    copies = copies[structure.engine[copies].argsort(kind="stable")]
    engine = structure.engine[copies]
    rows, owners = [copies[:0]], [copies[:0]]
    for number, sequence in enumerate(sequences):
        recompute = alignment.recomputes[sequence.recompute]
        mine = slice(*engine.searchsorted([recompute.engine, recompute.engine + 1]).tolist())
        if mine.start == mine.stop and not ran[sequence.recompute]:
            continue
        if sequence.first <= middle_of_block(structure, recompute.again) < sequence.stop:
            work = own.rows[own.owner == sequence.recompute]
            again = alignment.again[np.isin(alignment.original, work)]
            rows += [work, again, _copies(facts, recompute.again, copies[mine])]
            owners.append(np.full(sum(map(len, rows[-3:])), number))
    found, first = np.unique(np.concatenate(rows), return_index=True)
    return OwnWork(found, np.concatenate(owners)[first])


def middle_of_block(structure: Structure, again: Int64) -> int:
    """Place in a recompute that is surely its function's block's: it may begin with other work."""
    return (first_of_block(structure, again) + len(again)) // 2


def _copies(facts: RecomputeFacts, again: Int64, copies: Int64) -> Int64:
    """The copies before a block that are as large as its input.

    The block's first operator with a gradient has that input. Autograd gives the same number to the
    operators before it, which have no gradient.
    """
    begin = first_of_block(facts.structure, again)
    number = facts.structure.number[again[begin:]]
    same = int((number == number[0]).argmin()) if number[0] >= 0 else 1
    size = _size(facts, int(again[begin + (same or len(number)) - 1]))
    before = copies[copies < again[begin]]
    wanted = [bool(size) and _size(facts, row) == size for row in before.tolist()]
    return np.asarray(before[np.array(wanted, np.bool_)])


def _size(facts: RecomputeFacts, row: int) -> tuple[int, ...]:
    """Sizes of a call's first tensor; empty where the trace does not have them."""
    inputs = parse_inputs(facts.trace.signatures[facts.calls.dims[row]])
    return inputs.shapes[0] if inputs is not None and inputs.shapes else ()


_COPIES = frozenset({"aten::new_empty_strided", "aten::empty_like", "aten::clone", "aten::copy_"})

# The engine's range, the node in it, its operators.
_LEVELS = 2


def find_own_passes(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> OwnWork:
    """The further backward passes of functions through one run, and their copies of gradients.

    By the position of their block's piece among the sequences; a call stands for all that it holds.
    """
    others = vocabulary.nodes_of(facts.structure.functions.names - {vocabulary.TORCHS_FUNCTION})
    if others.isdisjoint(facts.calls.names):
        return OwnWork(*np.empty((2, 0), np.int64))
    passes = _Passes(facts)
    found = []
    for number, sequence in enumerate(sequences):
        recompute = facts.alignment.recomputes[sequence.recompute]
        if sequence.first <= middle_of_block(facts.structure, recompute.again) < sequence.stop:
            found += [(row, number) for row in passes.of(recompute)]
    return OwnWork(*np.array(sorted(found), np.int64).reshape(-1, 2).T)


class _Passes:
    """By the recompute that a function makes."""

    def __init__(self, facts: RecomputeFacts) -> None:
        self._facts = facts
        self._engines = facts.structure.rows(Role.BACKWARD)
        above = facts.calls.parent[self._engines]
        self._around = np.where(above >= 0, facts.structure.engine[above], -1)

    def of(self, recompute: Recompute) -> Iterator[int]:
        """By the engine's range around the function's node, if it is not torch's function."""
        # A recompute that another node ran before belongs to the node that goes through it.
        nodes = self._facts.structure.evaluations
        through = int(nodes.through[recompute.again[len(recompute.again) // 2]])
        node = int(nodes.row[through]) if through >= 0 else recompute.engine
        if node >= 0 and is_of_others(self._facts.structure, node):
            yield from self._evaluated_again(node)
            yield from self._copied(node)

    def _evaluated_again(self, node: int) -> Iterator[int]:
        """All but the last evaluation of each node that the function's node evaluates again.

        Work of an earlier evaluation alone stays, such as a gradient that a later one leaves out.
        """
        begin, end = self._engines.searchsorted([node + 1, node + 1 + self._facts.calls.size[node]])
        # Those right in it, without a range in between.
        inside = self._engines[begin:end][self._around[begin:end] == node]
        number = self._facts.structure.number[inside]
        inside, number = inside[number >= 0], number[number >= 0]
        later: dict[int, int] = {}
        for row, one in zip(inside[::-1].tolist(), number[::-1].tolist(), strict=True):
            if one in later:
                yield from self._also_in(row, later[one], _LEVELS)
            later[one] = row

    def _also_in(self, row: int, other: int, levels: int) -> Iterator[int]:
        """The call itself if the other holds all that it does, or those in it that the other has.

        What runs again in it goes or stays for itself.
        """
        stop = row + 1 + int(self._facts.calls.size[row])
        operators = OPERATORS[self._facts.structure.role[row:stop]]
        if not operators.any() and not self._names(row) - self._names(other):
            yield row
            return
        if operators[0] or not levels:
            return
        called = self._facts.calls.called
        others: dict[str, list[int]] = {}
        for child in reversed(self._children(other)):
            others.setdefault(called(child), []).append(child)
        for child in self._children(row):
            alike = others.get(called(child))
            if alike:
                yield from self._also_in(child, alike.pop(), levels - 1)

    def _copied(self, node: int) -> Iterator[int]:
        """The copy of the gradient that the node gives, where it is added right behind the node."""
        calls = self._facts.calls
        stop = node + 1 + int(calls.size[node])
        at = int(self._engines.searchsorted(stop))
        if at == len(self._engines):
            return
        adds = int(self._engines[at])
        added = calls.called(adds) == vocabulary.ACCUMULATE_GRAD
        if calls.parent[adds] != calls.parent[node] or not added:
            return
        inside = range(adds + 1, adds + 1 + int(calls.size[adds]))
        yield from (row for row in inside if calls.called(row) in _COPIES)

    def _children(self, row: int) -> list[int]:
        calls = self._facts.calls
        inside = np.arange(row + 1, row + 1 + int(calls.size[row]))
        found: list[int] = inside[calls.parent[inside] == row].tolist()
        return found

    def _names(self, row: int) -> Counter[str]:
        inside = range(row, row + 1 + int(self._facts.calls.size[row]))
        return Counter(self._facts.calls.called(one) for one in inside)
