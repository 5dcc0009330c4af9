"""One step compared: each region's forward, and each of its recomputes with it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from recompute_scan.faithful import (
    ComparedRegion,
    Difference,
    Fidelity,
    KeptState,
    LostGradient,
    Operation,
)
from recompute_scan.fidelity.checker import Checker, differ
from recompute_scan.fidelity.fingerprint import Fingerprint, unseen
from recompute_scan.fidelity.operators import tensors
from recompute_scan.fidelity.random_state import python_states
from recompute_scan.fidelity.state import ModuleState, changed_again, look_at_state
from recompute_scan.fidelity.tape import Entry, Tape
from recompute_scan.fidelity.uses import (
    Around,
    Arrives,
    Graph,
    Handed,
    graphs_below,
    see_what_is_handed,
)
from recompute_scan.fidelity.watch import NameOf, Step, Thread, Watch, nodes_so_far

# What a run of a region is to be told when it returns: what it returns.
Returned = Callable[[Any], None]

# Of one region; a model has the same fault in each layer, and each in its own region.
_MOST = 8


class Comparing:
    """Compares while it is on. Regions tell it when they are entered; it never fails for them."""

    def __init__(self, name_of: NameOf, around: Around) -> None:
        """Nothing is compared yet.

        Args:
            name_of: Name and class of a module.
            around: Makes the hooks that torch calls, so that what fails in ours stays with us.
        """
        self._name_of = name_of
        self._around = around
        self._step = Step()
        self._thread = Thread(self._step)
        self._regions: dict[ComparedRegion, _Sum] = {}
        self._began = time.perf_counter()

    def region(self, region: ComparedRegion, modules: Sequence[nn.Module] = ()) -> RegionCall:
        """One call of a region.

        Args:
            region: What is known of it, with nothing compared yet.
            modules: The modules it covers.
        """
        total = self._regions.setdefault(region, _Sum())
        named = [(self._name_of(module)[0], module) for module in modules]
        non_reentrant = region.variant == "non-reentrant"
        return RegionCall(
            total, named, self._thread, self._name_of, self._around, non_reentrant=non_reentrant
        )

    def hand_over(self, hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        """A checkpoint is about to put its hooks in place, and to run what it checkpoints."""
        if self._step.under_way:
            self._thread.handed = see_what_is_handed(hooks, self._around)

    def outcome(self) -> Fidelity:
        """The step has ended: what was seen."""
        self._step.under_way = False
        regions = tuple(total.of(region) for region, total in self._regions.items())
        return Fidelity(regions, (time.perf_counter() - self._began) * 1e3)


class _Sum(Struct):
    """All calls of one region."""

    calls: int = 0
    recomputes: list[_Shown] = field(default_factory=list)
    untold: dict[str, None] = field(default_factory=dict)
    states: dict[str, KeptState] = field(default_factory=dict)

    def of(self, region: ComparedRegion) -> ComparedRegion:
        """What the step has shown, when its backward passes have ended."""
        differences: dict[tuple[str, str, str], Difference] = {}
        lost: dict[tuple[str, str], LostGradient] = {}
        unused = 0
        for one in self.recomputes:
            difference = one.difference
            if difference is not None:
                where = difference.operation
                differences.setdefault((difference.kind, where.name, where.site), difference)
            else:
                unused += one.differing
            for gone in one.lost:
                lost.setdefault((gone.name, gone.why), gone)
        roundings = [one.rounding for one in self.recomputes if one.rounding is not None]
        return replace(
            region,
            calls=self.calls,
            recomputes=len(self.recomputes),
            operators=sum(one.operators for one in self.recomputes),
            random_operators=sum(one.random for one in self.recomputes),
            unused=unused,
            untold=tuple(self.untold),
            rounding=max(roundings, default=None),
            differences=tuple(differences.values())[:_MOST],
            states=tuple(self.states.values())[:_MOST],
            lost=tuple(lost.values())[:_MOST],
        )


class _Shown(Struct, frozen=True):
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


class RegionCall:
    """One call: its forward is noted, and each recompute followed along it."""

    def __init__(
        self,
        total: _Sum,
        modules: Sequence[tuple[str, nn.Module]],
        thread: Thread,
        name_of: NameOf,
        around: Around,
        *,
        non_reentrant: bool,
    ) -> None:
        self._around = around
        self._non_reentrant = non_reentrant
        self._sum = total
        self._modules = modules
        self._thread = thread
        self._name_of = name_of
        self._wanted = True
        self._forward: _Forward | None = None

    @contextmanager
    def forward(self) -> Iterator[Returned | None]:
        """Around the forward's run."""
        handed = self._claim()
        if not self._can_compare():
            yield None
            return
        run = _Forward(self.leave_untold, handed, look_at_state(self._modules), python_states())
        with self._watched(run):
            yield None
        if self._wanted:
            self._sum.calls += not any(isinstance(one, _Recompute) for one in self._thread.runs)
            run.end(look_at_state(self._modules), python_states())
            self._forward = run

    @contextmanager
    def recompute(self) -> Iterator[Returned | None]:
        """Around the run of a recompute, which may end early. Tell what it returns."""
        forward, handed = self._forward, self._claim()
        if forward is None or not self._can_compare():
            yield None
            return
        parameters = {
            id(parameter): f"{name}.{inner}" if name else inner
            for name, module in self._modules
            for inner, parameter in module.named_parameters()
        }
        run = _Recompute(self.leave_untold, handed, forward, parameters, self._around)
        began = look_at_state(self._modules)
        try:
            with self._watched(run):
                yield None if self._non_reentrant else run.returned
        finally:  # it may stop early, by an exception
            if self._wanted:
                ended = look_at_state(self._modules)
                for state in changed_again(forward.before, forward.after, began, ended):
                    self._sum.states.setdefault(state.name, state)
                self._sum.recomputes.append(run.shown())

    def _claim(self) -> Handed | None:
        """What the checkpoint's hooks, which were put in place just before, will see."""
        handed, self._thread.handed = self._thread.handed, None
        return handed if self._non_reentrant else None

    @contextmanager
    def _watched(self, run: _Run) -> Iterator[None]:
        runs = self._thread.runs
        runs.append(run)
        try:
            with Watch(self._thread, self._name_of):
                yield
        finally:
            runs.remove(run)

    def _can_compare(self) -> bool:
        if self._wanted and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.leave_untold("The region ran while a CUDA graph was captured.")
        return self._wanted

    def leave_untold(self, why: str) -> None:
        """Compare no more runs of this call, and say why."""
        self._wanted = False
        self._sum.untold[why] = None


class _Run:
    """What both kinds of runs have."""

    def __init__(self, untold: Callable[[str], None], handed: Handed | None) -> None:
        self.tape = Tape()
        self.grad_mode = torch.is_grad_enabled()
        self.handed = handed
        self._untold = untold

    def made(
        self,
        entry: Entry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """A call has been noted on the tape."""

    def saved(self, tensor: torch.Tensor, place: int) -> None:
        """A node of this run saves a tensor."""
        try:
            unseen(self._see_saved, tensor, place)
        except Exception as error:
            self.failed(error)

    def _see_saved(self, tensor: torch.Tensor, place: int) -> None:
        """Keep what it takes to compare it."""

    def failed(self, error: Exception) -> None:
        """Looking has failed: the region is not compared any more."""
        self._untold(f"Its results could not be looked at ({type(error).__name__}).")


class _Forward(_Run):
    def __init__(
        self,
        untold: Callable[[str], None],
        handed: Handed | None,
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

    def _see_saved(self, tensor: torch.Tensor, place: int) -> None:
        self.prints.append(self.tape.print_of(tensor))

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


class _Recompute(_Run):
    def __init__(
        self,
        untold: Callable[[str], None],
        handed: Handed | None,
        forward: _Forward,
        parameters: dict[int, str],
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
        entry: Entry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """Compare it with the forward's."""
        self._checker.meet(entry, where, repeat)

    def _see_saved(self, tensor: torch.Tensor, place: int) -> None:
        known = self._forward.prints
        now = self.tape.print_of(tensor)
        if place >= len(known) or now is None or not differ(known[place], now):
            return
        self._differing.append((place, self.tape.maker_of(tensor), now))

    def returned(self, result: Any) -> None:
        """The recompute returns, and the backward pass will run through its own nodes."""
        try:
            outputs = [one for one in tensors((result,)) if one.grad_fn is not None]
            # A subclass is to see its tensors pass, or it would be lost from the graph.
            with torch.no_grad(), _disable_current_modes():
                graphs = graphs_below(outputs, self._first_node, self._around)
            unseen(self._see_graphs, outputs, graphs)
        except Exception as error:
            self.failed(error)

    def _see_graphs(self, outputs: list[torch.Tensor], graphs: list[Graph]) -> None:
        self._possible = []
        for output, graph in zip(outputs, graphs, strict=True):
            makers = {self.tape.maker_of(one) for one in graph.saved} - {None}
            outside = (self.tape.print_of(one) for one in graph.saved if self.tape.is_outside(one))
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

    def shown(self) -> _Shown:
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
        return _Shown(
            checker.compared,
            checker.random,
            checker.differing,
            checker.rounding,
            checker.lost,
            tuple((used, _explained(one, forward, self._drawn_from)) for used, one in possible),
        )


def _always() -> bool:
    return True


def _explained(difference: Difference, forward: _Forward, drawn_from: dict[str, int]) -> Difference:
    """A difference whose operators do not explain it, where Python's random numbers do."""
    if difference.kind not in (
        "operators",
        "value",
        "argument",
        "input",
        "shape",
    ):
        return difference
    other = [name for name, state in forward.drew.items() if drawn_from.get(name) != state]
    return replace(difference, kind="random", generator=other[0]) if other else difference
