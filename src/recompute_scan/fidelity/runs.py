"""The runs of a region that are compared: what its forward leaves, and what a recompute shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.utils._python_dispatch import _disable_current_modes

from recompute_scan.fidelity.backward_reads import (
    Around,
    Arrives,
    HandedTensors,
    SavedGraph,
    graphs_below,
)
from recompute_scan.fidelity.checker import Checker, differ
from recompute_scan.fidelity.operators import tensors
from recompute_scan.fidelity.state import ModuleState, python_states
from recompute_scan.fidelity.tape import Prints, Tape, TapeEntry, function_modes, nodes_so_far
from recompute_scan.fidelity.tensors import Fingerprint, is_plain, unseen, unseen_below
from recompute_scan.result.fidelity import Difference, LostGradient, Operation


class Shown(Struct, frozen=True):
    """What one recompute has shown: no tensors, and no fingerprints.

    Attributes:
        operators: Results compared.
        random: Of these, drawn ones.
        differing: Of these, those that differ by more than rounding.
        rounding: Largest distance of one that differs by rounding only.
        lost: Gradients that are lost.
        possible: Differences, the first one first, and whether the backward pass has used what
            differs; it may not have come to that yet.
    """

    operators: int
    random: int
    differing: int
    rounding: float | None
    lost: tuple[LostGradient, ...]
    possible: tuple[tuple[Callable[[], bool], Difference], ...]

    @property
    def difference(self) -> Difference | None:
        """The first difference that changes a gradient; asked for behind the backward pass."""
        return next((difference for used, difference in self.possible if used()), None)


class RegionRun:
    """What both kinds of runs have.

    Attributes:
        keeps: Whether later runs are compared with it.
    """

    keeps = False

    def __init__(self, untold: Callable[[str], None], handed: HandedTensors | None) -> None:
        self.tape = Tape()
        self.grad_mode = torch.is_grad_enabled()
        self.handed = handed
        self._untold = untold

    def made(
        self,
        entry: TapeEntry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """A call has been noted on the tape."""

    def saved(self, tensor: torch.Tensor, place: int) -> None:
        """A node of this run saves a tensor."""
        try:
            hide = unseen
            if not function_modes() and is_plain(tensor) and tensor.layout == torch.strided:
                known = self.tape.at_hand(tensor)
                if known is not None and self._saved_known(known, place):
                    return
                hide = unseen_below
            hide(self._see_saved, tensor, place, Prints((self,)))
        except Exception as error:
            self.failed(error)

    def _saved_known(self, print_: Fingerprint, place: int) -> bool:
        """Whether it takes no more than its fingerprint to compare it, which is done then."""
        return False

    def _see_saved(self, tensor: torch.Tensor, place: int, prints: Prints) -> None:
        """Keep what it takes to compare it."""

    def failed(self, error: Exception) -> None:
        """Looking has failed: the region is not compared any more."""
        self._untold(f"Its results could not be looked at ({type(error).__name__}).")


class ForwardRun(RegionRun):
    """The first run of a region: what a recompute is compared with."""

    keeps = True

    def __init__(
        self,
        untold: Callable[[str], None],
        handed: HandedTensors | None,
        before: ModuleState,
        random_before: dict[str, int],
    ) -> None:
        super().__init__(untold, handed)
        if handed is not None:
            handed.run = self
        self.before = before
        self.after = before
        self._random_before = random_before
        self.drew: dict[str, int] = {}
        self.prints: list[Fingerprint | None] = []

    def _saved_known(self, print_: Fingerprint, place: int) -> bool:
        self.prints.append(print_)
        return True

    def _see_saved(self, tensor: torch.Tensor, place: int, prints: Prints) -> None:
        self.prints.append(self.tape.print_of(tensor, prints))
        prints.let_go()

    def end(self, after: ModuleState, random_after: dict[str, int]) -> None:
        """The forward has ended; only what another run may need is kept."""
        self.after = after
        if self.handed is not None:
            self.handed.run = None
        self.drew = {
            name: state
            for name, state in self._random_before.items()
            if random_after.get(name) != state
        }


class PartRun(RegionRun):
    """A recompute on other parts than the forward's runs: only where it draws can be compared."""

    def __init__(self, untold: Callable[[str], None], forwards: Iterable[ForwardRun]) -> None:
        super().__init__(untold, None)
        entries = (entry for one in forwards for entry in one.tape.entries)
        self._drawn = {entry.drawing.before for entry in entries if entry.drawing}
        self._found: Difference | None = None

    def made(
        self,
        entry: TapeEntry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """Note the first call that draws from a state from which no call of the forward drew."""
        drawing = entry.drawing
        if self._found is None and drawing is not None and drawing.before not in self._drawn:
            self._found = Difference("random", where(), generator=drawing.generator)

    def shown(self) -> Shown | None:
        """What it has shown, if anything."""
        if self._found is None:
            return None
        return Shown(0, 1, 1, None, (), ((_always, self._found),))


class RecomputeRun(RegionRun):
    """A recompute, followed along the forward as it goes."""

    def __init__(
        self,
        untold: Callable[[str], None],
        handed: HandedTensors | None,
        forward: ForwardRun,
        parameters: Callable[[], dict[int, str]],
        around: Around,
    ) -> None:
        super().__init__(untold, handed)
        self._around = around
        self._forward = forward
        self._checker = Checker(forward.tape.entries, parameters, grad_mode=self.grad_mode)
        self._drawn_from = python_states()
        self._first_node = nodes_so_far()
        self._differing: list[tuple[int, int | None, Fingerprint]] = []
        self._possible: list[tuple[Callable[[], bool], Difference]] | None = None
        if handed is not None and forward.handed is not None:
            handed.run, self._possible = self, []

    def made(
        self,
        entry: TapeEntry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """Compare it with the forward's."""
        self._checker.meet(entry, where, repeat)

    def _saved_known(self, print_: Fingerprint, place: int) -> bool:
        known = self._forward.prints
        before = known[place] if place < len(known) else None
        return before is None or before.same_bits(print_)

    def _see_saved(self, tensor: torch.Tensor, place: int, prints: Prints) -> None:
        known = self._forward.prints
        now = self.tape.print_of(tensor, prints)
        if place < len(known) and now is not None and differ(known[place], now):
            self._differing.append((place, self.tape.maker_of(tensor), now))
        prints.let_go()

    def returned(self, result: Any) -> None:
        """The recompute returns, and the backward pass will run through its own nodes."""
        try:
            outputs = [one for one in tensors((result,)) if one.grad_fn is not None]
            # A subclass is to see its tensors pass, or it would be lost from the graph.
            with torch.no_grad(), _disable_current_modes():
                graphs = graphs_below(outputs, self._first_node)
            unseen(self._see_graphs, outputs, graphs)
        except Exception as error:
            self.failed(error)

    def _see_graphs(self, outputs: list[torch.Tensor], graphs: list[SavedGraph]) -> None:
        self._possible = []
        for output, graph in zip(outputs, graphs, strict=True):
            makers = {self.tape.maker_of(one) for one in graph.saved} - {None}
            prints = Prints((self,))
            outside = [
                self.tape.print_of(one, prints) for one in graph.saved if self.tape.is_outside(one)
            ]
            prints.let_go()
            cause = (
                self._checker.difference
                if graph.unknown
                else self._checker.cause_in_graph(
                    {one for one in makers if one is not None},
                    [one for one in outside if one is not None],
                    graph.nodes,
                )
            )
            if cause is not None:
                arrives = Arrives(output, self._around) if len(outputs) > 1 else _always
                self._possible.append((arrives, cause))

    def shown(self) -> Shown:
        """The recompute has ended: what it has shown."""
        checker, forward = self._checker, self._forward
        if self.handed is not None:
            self.handed.run = None
        possible = self._possible
        if possible is None:  # what backward uses cannot be seen
            possible = [(_always, one) for one in (checker.difference,) if one is not None]
        for place, maker, print_ in self._differing:
            cause = checker.cause_of_saved(maker, print_)
            if cause is not None and forward.handed is not None:
                used = functools.partial(forward.handed.used.__contains__, place)
                possible.append((used, cause))
        return Shown(
            checker.compared,
            checker.random,
            checker.differing,
            checker.rounding,
            checker.lost,
            tuple((used, _explained(one, forward, self._drawn_from)) for used, one in possible),
        )


def _always() -> bool:
    return True


def _explained(
    difference: Difference, forward: ForwardRun, drawn_from: dict[str, int]
) -> Difference:
    """A difference whose operators do not explain it, where Python's random numbers do."""
    if difference.kind not in ("operators", "value", "argument", "input", "shape"):
        return difference
    other = [name for name, state in forward.drew.items() if drawn_from.get(name) != state]
    return replace(difference, kind="random", generator=other[0]) if other else difference
