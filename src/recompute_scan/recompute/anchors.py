"""Where a sequence of recomputed operators is expected: by autograd's numbers and by checkpoints.

A node carries the sequence number that autograd gave out when the operator of the forward pass
ran, so it leads from a place in the backward pass to one in the forward pass. Inside a
reentrant recompute the numbers are those of the recomputed operators, which lead on to theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from recompute_scan.recompute.roles import AGAIN, Role, Structure
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Int64, Ints

if TYPE_CHECKING:
    from recompute_scan.recompute.sequences import Recompute


class Anchor(Struct, frozen=True):
    """Where a sequence is expected: places in the forward sequence.

    ``first`` and ``last`` bound the checkpointed call; ``first`` is -1 where only the expected
    end is known.
    """

    first: int
    last: int


class Anchors:
    """Finds the anchor of an engine range, and knows what has been matched so far."""

    def __init__(self, calls: Calls, structure: Structure, forward: Int64, engines: Int64) -> None:
        self._calls = calls
        self._structure = structure
        self._forward = forward
        self._origin = np.full(len(calls), -1, np.int32)
        self._origin[forward] = forward
        numbered = structure.number >= 0
        functions = (structure.role == Role.RANGE) & numbered & (structure.function >= 0)
        functions &= structure.function == np.arange(len(calls))
        outside = structure.engine < 0
        rows = np.flatnonzero(numbered & outside & ((structure.role == Role.FORWARD) | functions))
        self._outer_rows = rows[structure.number[rows].argsort(kind="stable")]
        self._outer_numbers = structure.number[self._outer_rows]
        self._askers = self._find_askers(engines)

    def remember(self, again: Int64, original: Int64) -> None:
        """Keep which forward operator each recomputed one repeats, for sequences inside it."""
        self._origin[again] = original

    def find(self, engine: int) -> Anchor | None:
        """Where the recomputes of an engine range are expected to end, and to begin if known."""
        row = self._askers[engine]
        return None if row < 0 else self._place(row, engine)

    def _find_askers(self, engines: Int64) -> dict[int, int]:
        """Row of the operator, or of the checkpoint function, whose node each engine range runs.

        -1 where none is known.
        """
        numbers = self._structure.number[engines]
        at, rows = self._outer(numbers)
        askers = np.full(len(engines), -1, np.int64)
        askers[at] = rows
        table = self._structure.evaluations
        evaluations = table.row.searchsorted(engines)
        nested = np.flatnonzero(table.parent[evaluations] >= 0)
        askers[nested] = self._find_nested(evaluations[nested])
        askers[numbers < 0] = -1
        return dict(zip(engines.tolist(), askers.tolist(), strict=True))

    def _find_nested(self, evaluations: Int64) -> Int64:
        """The same for nodes of nested backwards: of the recompute that started each, no other."""
        structure, table = self._structure, self._structure.evaluations
        maker = table.maker[evaluations]
        mine = (maker >= 0) & (table.of[maker] == table.made_in[table.parent[evaluations]])
        top = structure.top[maker]
        asker = np.where(AGAIN[structure.role[top]] & (top >= 0), top, maker)
        known = AGAIN[structure.role[asker]] | (structure.role[asker] == Role.RANGE)
        return np.where(mine & known, asker, -1)

    def _place(self, row: int, engine: int) -> Anchor | None:
        """Where the forward run of ``row`` stands: an operator, or a checkpoint function."""
        if self._structure.function[row] == row:
            origins = self._origin[row + 1 : row + 1 + int(self._calls.size[row])]
            origins = origins[origins >= 0]
            if not len(origins):
                return None
            whole = bool(self._structure.checkpoint_node[engine])
            first = int(self._forward.searchsorted(origins.min())) if whole else -1
            return Anchor(first, int(self._forward.searchsorted(origins.max())))
        origin = int(self._origin[row])
        return None if origin < 0 else Anchor(-1, int(self._forward.searchsorted(origin)))

    def count_passes(self, recomputes: Sequence[Recompute]) -> tuple[Int64, Int64]:
        """For each forward operator: how many backward passes went through its node; and how many
        did or ran it again, at least 1.

        A checkpoint function's node is that of all its operators, and what a function or a model
        ran again by design went backward where that did.
        """
        calls, structure, forward = self._calls, self._structure, self._forward
        table = structure.evaluations
        root = np.flatnonzero((table.parent < 0) & (table.number >= 0))
        if not len(root) or not len(self._outer_rows):
            # No sequence numbers in this trace: all that ran before a backward has one.
            last = calls.start[table.row].max(initial=-1)
            backwards = np.asarray(calls.start[forward] < last, np.int64)
            return backwards, np.maximum(backwards, 1)
        at, rows = self._outer(table.number[root])
        owner = self._owners()
        pairs = rows * np.int64(len(table.row)) + table.root_pass[root[at]]
        return self._counted(np.unique(pairs), owner, recomputes)

    def _counted(
        self, pairs: Int64, owner: Int64, recomputes: Sequence[Recompute]
    ) -> tuple[Int64, Int64]:
        """The same, of pairs of an owner's row and a backward pass, ascending."""
        table = self._structure.evaluations
        many = len(table.row)
        backwards = pairs.searchsorted((owner + 1) * many) - pairs.searchsorted(owner * many)
        extra = []
        for each in recomputes:
            place = self._forward.searchsorted(each.original)
            one = int(table.root_pass[table.row.searchsorted(each.engine)])
            extra.append(2 * (place * many + one) + each.by_design)
        if not extra:
            return backwards, np.maximum(backwards, 1)
        found = np.unique(np.concatenate(extra))
        place, by_design = found // 2 // many, found % 2 > 0
        new = ~np.isin(owner[place] * many + found // 2 % many, pairs)
        ran = np.unique(found[new] // 2, return_counts=True)[0] // many
        passes = backwards + np.bincount(ran, minlength=len(backwards))
        designed = np.unique(place[by_design & (backwards[place] == 0)], return_counts=True)
        backwards[designed[0]] = designed[1]
        return backwards, np.maximum(passes, 1)

    def _owners(self) -> Int64:
        """For each forward operator: its row, or that of the outermost function around it."""
        outermost = self._outermost_function(self._structure.function[self._forward])
        return np.where(outermost >= 0, outermost, self._forward).astype(np.int64)

    def _outer(self, numbers: Ints) -> tuple[Int64, Int64]:
        """Positions of those of these numbers that lead to the forward pass, and rows there."""
        at = self._outer_numbers.searchsorted(numbers, side="right") - 1
        known = np.flatnonzero(at >= 0)
        return known, self._outer_rows[at[known]]

    def _outermost_function(self, function: Ints) -> Ints:
        outermost: Ints = function.copy()
        for _ in range(64):
            parents = np.where(outermost >= 0, self._calls.parent[outermost], -1)
            above = np.where(parents >= 0, self._structure.function[parents], -1)
            if not (above >= 0).any():
                break
            outermost = np.where(above >= 0, above, outermost)
        return outermost
