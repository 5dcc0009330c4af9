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
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.cost.formulas import parse_inputs
from recompute_scan.cost.reruns import OpSequence
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.own_work import find_own_work, first_of_block
from recompute_scan.recompute.roles import Role, Structure
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
