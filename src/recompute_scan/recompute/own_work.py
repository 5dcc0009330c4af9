"""What checkpoint functions work out in the forward pass beside their blocks.

A function may put its input away in another form or another place before it runs its block, or
behind it. Its node runs the block again, and that work not: so it is what the function's call holds
directly outside what its node repeats with gradients on. A checkpoint around the function repeats
it. torch's own function does no such work: there that is the block's, outside of autograd.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment
from recompute_scan.recompute.roles import Structure
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Int64


class OwnWork(Struct, frozen=True):
    """That work in the forward pass.

    Attributes:
        rows: Rows of its operators, in order.
        recompute: For each: position in ``Alignment.recomputes`` of what its function ran again.
    """

    rows: Int64
    recompute: Int64


def find_own_work(calls: Calls, structure: Structure, alignment: Alignment) -> OwnWork:
    """That work of all functions in a trace."""
    blocks: dict[int, tuple[int, int, int]] = {}
    for number, recompute in enumerate(alignment.recomputes):
        if not is_of_others(calls, structure, recompute.engine):
            continue
        begin = first_of_block(structure, recompute.again)
        rows, again = recompute.original[begin:], recompute.again[begin:]
        middle = len(rows) // 2
        # A node runs again what its call holds, further functions' calls among that.
        around = _calls_around(calls, structure, int(rows[middle]))
        inside = len(_calls_around(calls, structure, int(again[middle])))
        name = vocabulary.function_of(calls.names[calls.name[recompute.engine]])
        if inside < len(around) and calls.names[calls.name[around[inside]]] == name:
            first, last, _ = blocks.get(around[inside], (len(calls), -1, number))
            bounds = min(first, int(rows.min())), max(last, int(rows.max()))
            blocks[around[inside]] = *bounds, number
    found, owners = [alignment.forward[:0]], [alignment.forward[:0]]
    for call, (first, last, number) in blocks.items():
        stop = call + 1 + int(calls.size[call])
        begin, end = alignment.forward.searchsorted((call, stop)).tolist()
        rows = alignment.forward[begin:end]
        outside = (rows < first) | (rows > last)
        found.append(rows[outside & (structure.function[rows] == call)])
        owners.append(np.full(len(found[-1]), number))
    rows, owner = np.concatenate(found), np.concatenate(owners)
    order = rows.argsort()
    return OwnWork(rows[order], owner[order])


def is_of_others(calls: Calls, structure: Structure, engine: int) -> bool:
    """Is the node in this engine's range that of a checkpoint function, and not of torch's own?"""
    if not structure.checkpoint_node[engine]:
        return False
    return vocabulary.function_of(calls.names[calls.name[engine]]) != vocabulary.TORCHS_FUNCTION


def without_gradients(alignment: Alignment, own: OwnWork) -> Alignment:
    """The alignment, in which that work has no backward pass: its function's is its block's."""
    backwards = alignment.backwards.copy()
    backwards[alignment.forward.searchsorted(own.rows)] = 0
    return replace(alignment, backwards=backwards)


def first_of_block(structure: Structure, again: Int64) -> int:
    """Place of the first operator that autograd records, or that is another function's; 0: none.

    A function's node runs its block with gradients on, and brings the input back without.
    """
    inside = (structure.number[again] >= 0) | (structure.function[again] >= 0)
    return int(np.flatnonzero(inside)[0]) if inside.any() else 0


def _calls_around(calls: Calls, structure: Structure, row: int) -> list[int]:
    """Rows of the calls of checkpoint functions around a call, innermost first.

    In a recompute, those inside the node that runs it.
    """
    found = []
    call = int(structure.function[row])
    while call >= 0:
        found.append(call)
        above = int(calls.parent[call])
        call = int(structure.function[above]) if above >= 0 else -1
    return found
