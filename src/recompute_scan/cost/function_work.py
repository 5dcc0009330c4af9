"""What a checkpoint function does beside its block, such as the copies that keep its input.

A function of one's own may put its input away, as offloading ones do: it copies it in the forward
pass, and back before it runs the block again. What its node does not run again is its own work
(:func:`recompute_scan.recompute.by_design.find_own_work`); of what its node does, the copies of its
input are. Autograd is off then, so they have no sequence number in the recompute; what the block
runs has one, whether its gradient is wanted or not
(``aten/src/ATen/core/dispatch/Dispatcher.cpp``). Nor is autograd on where FSDP gathers the block's
parameters, but those are of another size than what the block takes.

Its node may do more in the backward pass than its block alone would. A function may go backward
through its second run more than once, such as for the gradient of its input and then for those of
its parameters: a node that it evaluates twice runs once without it. And it may hold on to the
gradient that it gives. Where that is added to a leaf, autograd then copies what it would have taken
(``torch/csrc/autograd/functions/accumulate_grad.h``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.cost.flops import parse_inputs
from recompute_scan.cost.reruns import OpSequence
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Recompute
from recompute_scan.recompute.by_design import find_own_work, first_of_block, is_of_others
from recompute_scan.recompute.roles import OPERATORS, Role, Structure
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.trace.columns import Int64

_COPY = re.compile(r"aten::(clone|contiguous|to|_to_copy|copy_)$")


class OwnRows(Struct, frozen=True):
    """What goes with checkpoint functions beside their blocks.

    Attributes:
        rows: Rows of the calls, those in the forward pass and in all recomputes; ascending.
        sequence: For each: position, among the pieces of recomputes, of the block that its function
            ran again.
    """

    rows: Int64
    sequence: Int64


def find_own_copies(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> OwnRows:
    """The copies that recomputes begin with, and the functions' work in the forward pass.

    Args:
        facts: What ran again.
        sequences: The recomputes, in pieces of a kind.
    """
    alignment, structure = facts.alignment, facts.structure
    own = find_own_work(facts.calls, structure, alignment)
    ran = np.bincount(own.recompute, minlength=len(alignment.recomputes))
    copies = structure.rows(Role.OWN_WORK)
    copies = copies[facts.calls.matching(_COPY)[facts.calls.name[copies]]]
    copies = copies[structure.engine[copies].argsort(kind="stable")]
    engine = structure.engine[copies]
    rows, owners = [copies[:0]], [copies[:0]]
    for number, sequence in enumerate(sequences):
        recompute = alignment.recomputes[sequence.recompute]
        mine = slice(*engine.searchsorted([recompute.engine, recompute.engine + 1]).tolist())
        if mine.start == mine.stop and not ran[sequence.recompute]:
            continue
        if sequence.first <= middle_of_block(structure, recompute.again) < sequence.stop:
            work = own.rows[own.recompute == sequence.recompute]
            again = alignment.again[np.isin(alignment.original, work)]
            rows += [work, again, _copies(facts, recompute.again, copies[mine])]
            owners.append(np.full(sum(map(len, rows[-3:])), number))
    found, first = np.unique(np.concatenate(rows), return_index=True)
    return OwnRows(found, np.concatenate(owners)[first])


def middle_of_block(structure: Structure, again: Int64) -> int:
    """Place in a recompute that is surely its function's block's: it may begin with other work."""
    return (first_of_block(structure, again) + len(again)) // 2


def _copies(facts: RecomputeFacts, again: Int64, copies: Int64) -> Int64:
    """Those of these copies before a block that are as large as its input.

    Its input is that of its first operator with a gradient. Autograd gives those before, which have
    none, the same number.
    """
    begin = first_of_block(facts.structure, again)
    number = facts.structure.number[again[begin:]]
    same = int((number == number[0]).argmin()) if number[0] >= 0 else 1
    size = _size(facts, int(again[begin + (same or len(number)) - 1]))
    before = copies[copies < again[begin]]
    wanted = [bool(size) and _size(facts, row) == size for row in before.tolist()]
    found: Int64 = before[np.array(wanted, np.bool_)]
    return found


def _size(facts: RecomputeFacts, row: int) -> tuple[int, ...]:
    """Sizes of a call's first tensor; none where the trace does not tell."""
    inputs = parse_inputs(facts.trace.signatures[facts.calls.dims[row]])
    return tuple(inputs.shapes[0] or ()) if inputs is not None and inputs.shapes else ()


_ADDS = re.compile(re.escape(vocabulary.ENGINE) + r"torch::autograd::AccumulateGrad$")
_COPIES = frozenset({"aten::new_empty_strided", "aten::empty_like", "aten::clone", "aten::copy_"})

# The engine's range, the node in it, its operators.
_LEVELS = 2


def find_own_passes(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> OwnRows:
    """Calls that go with checkpoint functions; a call stands for all that it holds.

    Args:
        facts: What ran again.
        sequences: The recomputes, in pieces of a kind.
    """
    others = vocabulary.nodes_of(facts.structure.functions.names - {vocabulary.TORCHS_FUNCTION})
    if others.isdisjoint(facts.calls.names):
        return OwnRows(*np.empty((2, 0), np.int64))
    passes = _Passes(facts)
    found = []
    for number, sequence in enumerate(sequences):
        recompute = facts.alignment.recomputes[sequence.recompute]
        if sequence.first <= middle_of_block(facts.structure, recompute.again) < sequence.stop:
            found += [(row, number) for row in passes.of(recompute)]
    return OwnRows(*np.array(sorted(found), np.int64).reshape(-1, 2).T)


class _Passes:
    """By the recompute that a function makes."""

    def __init__(self, facts: RecomputeFacts) -> None:
        self._facts = facts
        self._engines = facts.structure.rows(Role.BACKWARD)
        above = facts.calls.parent[self._engines]
        self._around = np.where(above >= 0, facts.structure.engine[above], -1)
        self._adds = facts.calls.matching(_ADDS)

    def of(self, recompute: Recompute) -> Iterator[int]:
        node = self._node(recompute)
        if node >= 0:
            yield from self._evaluated_again(node)
            yield from self._copied(node)

    def _node(self, recompute: Recompute) -> int:
        """Row of the engine's range around the function's node; -1 where there is none, or torch's.

        What another node ran before is that of the node that goes through it.
        """
        calls, structure = self._facts.calls, self._facts.structure
        through = int(structure.evaluations.through[recompute.again[len(recompute.again) // 2]])
        found = int(structure.evaluations.row[through]) if through >= 0 else recompute.engine
        return found if found >= 0 and is_of_others(calls, structure, found) else -1

    def _evaluated_again(self, node: int) -> Iterator[int]:
        """Of each node that the function's evaluates more than once: all but the last time.

        What only an earlier time did stays, such as a gradient that a later one does not ask for.
        """
        inside = self._nested(node)
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
        others: dict[str, list[int]] = {}
        for child in reversed(self._children(other)):
            others.setdefault(self._name(child), []).append(child)
        for child in self._children(row):
            alike = others.get(self._name(child))
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
        if calls.parent[adds] != calls.parent[node] or not self._adds[calls.name[adds]]:
            return
        inside = range(adds + 1, adds + 1 + int(calls.size[adds]))
        yield from (row for row in inside if self._name(row) in _COPIES)

    def _nested(self, node: int) -> Int64:
        """The engine's ranges in that of a node, but those in another."""
        stop = node + 1 + int(self._facts.calls.size[node])
        begin, end = self._engines.searchsorted([node + 1, stop])
        inside: Int64 = self._engines[begin:end][self._around[begin:end] == node]
        return inside

    def _children(self, row: int) -> list[int]:
        calls = self._facts.calls
        inside = np.arange(row + 1, row + 1 + int(calls.size[row]))
        found: list[int] = inside[calls.parent[inside] == row].tolist()
        return found

    def _names(self, row: int) -> Counter[str]:
        inside = range(row, row + 1 + int(self._facts.calls.size[row]))
        return Counter(self._name(one) for one in inside)

    def _name(self, row: int) -> str:
        name: str = self._facts.calls.names[self._facts.calls.name[row]]
        return name
