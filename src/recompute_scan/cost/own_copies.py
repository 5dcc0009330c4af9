"""What a checkpoint function does beside its block, such as the copies in which it keeps its input.

A function of one's own may put its input away, as offloading ones do: it copies it in the forward
pass, and back before it runs the block again. What its node does not run again is its own work
(:mod:`recompute_scan.recompute.own_work`); of what its node does, the copies of its input are.
Autograd is off then, so they have no sequence number in the recompute; what the block runs has one,
whether its gradient is wanted or not (``aten/src/ATen/core/dispatch/Dispatcher.cpp``). Nor is
autograd on where FSDP gathers the block's parameters, but those are of another size than what the
block takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.cost.formulas import parse_inputs
from recompute_scan.cost.reruns import OpSequence
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.own_work import find_own_work, first_of_block
from recompute_scan.recompute.structure import Structure
from recompute_scan.trace.columns import Bool, Int64

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
    firsts = alignment.again[alignment.begins]
    copying = facts.calls.matching(_COPY)[facts.calls.name[firsts]]
    copying &= (structure.number[firsts] < 0) & (structure.function[firsts] < 0)
    copying &= _in_others(facts, alignment.original[alignment.begins])
    own = find_own_work(facts.calls, structure, alignment)
    working = np.zeros(len(alignment.recomputes), np.bool_)
    working[own.recompute] = True
    originals, owners = [], []
    for number, sequence in enumerate(sequences):
        if not (copying[sequence.recompute] or working[sequence.recompute]):
            continue
        recompute = alignment.recomputes[sequence.recompute]
        begin = first_of_block(structure, recompute.again)
        if sequence.first <= middle_of_block(structure, recompute.again) < sequence.stop:
            copies = list(_copies(facts, recompute.again, begin))
            # Of what its node runs again without gradients only the copies are surely its own.
            work = own.rows[own.recompute == sequence.recompute]
            work = work[~np.isin(work, recompute.original)]
            originals.append(np.append(recompute.original[copies], work))
            owners.append(np.full(len(originals[-1]), number))
    if not originals:
        return OwnRows(*np.empty((2, 0), np.int64))
    original, first = np.unique(np.concatenate(originals), return_index=True)
    owner = np.concatenate(owners)[first]
    again = np.isin(alignment.original, original)
    rows = np.append(original, alignment.again[again])
    owner = np.append(owner, owner[original.searchsorted(alignment.original[again])])
    order = rows.argsort()
    return OwnRows(rows[order], owner[order])


def middle_of_block(structure: Structure, again: Int64) -> int:
    """Place in a recompute that is surely its function's block's: it may begin with other work."""
    return (first_of_block(structure, again) + len(again)) // 2


def _in_others(facts: RecomputeFacts, rows: Int64) -> Bool:
    """For each row: is it right in a checkpoint function that is not torch's? That copies none."""
    function = facts.structure.function[rows]
    torchs = np.array([name == words.TORCHS_FUNCTION for name in facts.calls.names], np.bool_)
    return (function >= 0) & ~torchs[facts.calls.name[function]]


def _copies(facts: RecomputeFacts, rows: Int64, begin: int) -> Iterator[int]:
    """Places of the copies before the block of what is as large as its input.

    Its input is that of its first operator with a gradient. Autograd gives those before, which have
    none, the same number.
    """
    number = facts.structure.number[rows[begin:]]
    same = int((number == number[0]).argmin()) if number[0] >= 0 else 1
    size = _size(facts, int(rows[begin + (same or len(number)) - 1]))
    for place, row in enumerate(rows[:begin].tolist()):
        name = facts.calls.names[facts.calls.name[row]]
        if size and _COPY.match(name) and _size(facts, row) == size:
            yield place


def _size(facts: RecomputeFacts, row: int) -> tuple[int, ...]:
    """Sizes of a call's first tensor; none where the trace does not tell."""
    inputs = parse_inputs(facts.trace.signatures[facts.calls.dims[row]])
    return tuple(inputs.shapes[0] or ()) if inputs is not None and inputs.shapes else ()
