"""One step compared: each region's forward, and each of its recomputes with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import nn

from recompute_scan.faithful import (
    ComparedRegion,
    Difference,
    Fidelity,
    KeptState,
    LostGradient,
    Operation,
)
from recompute_scan.fidelity.checker import Checker
from recompute_scan.fidelity.fingerprint import Fingerprint
from recompute_scan.fidelity.random_state import python_states
from recompute_scan.fidelity.state import ModuleState, changed_again, look_at_state
from recompute_scan.fidelity.tape import Entry, Tape
from recompute_scan.fidelity.watch import NameOf, Step, Thread, Watch

# Of one region; a model has the same fault in each layer, and each in its own region.
_MOST = 8


class Comparing:
    """Compares while it is on. Regions tell it when they are entered; it never fails for them."""

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
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
        return RegionCall(total, named, self._thread, self._name_of)

    def outcome(self) -> Fidelity:
        """The step has ended: what was seen."""
        self._step.under_way = False
        regions = tuple(total.of(region) for region, total in self._regions.items())
        return Fidelity(regions, (time.perf_counter() - self._began) * 1e3)


class _Sum(Struct):
    """All calls of one region."""

    calls: int = 0
    recomputes: int = 0
    operators: int = 0
    random: int = 0
    rounding: float | None = None
    untold: dict[str, None] = field(default_factory=dict)
    differences: dict[tuple[str, str, str], Difference] = field(default_factory=dict)
    states: dict[str, KeptState] = field(default_factory=dict)
    lost: dict[tuple[str, str], LostGradient] = field(default_factory=dict)

    def add(self, checker: Checker, difference: Difference | None) -> None:
        self.recomputes += 1
        self.operators += checker.compared
        self.random += checker.random
        if checker.rounding is not None:
            self.rounding = max(self.rounding or 0.0, checker.rounding)
        if difference is not None:
            where = difference.operation
            self.differences.setdefault((difference.kind, where.name, where.site), difference)
        for lost in checker.lost:
            self.lost.setdefault((lost.name, lost.why), lost)

    def of(self, region: ComparedRegion) -> ComparedRegion:
        return replace(
            region,
            calls=self.calls,
            recomputes=self.recomputes,
            operators=self.operators,
            random_operators=self.random,
            untold=tuple(self.untold),
            rounding=self.rounding,
            differences=tuple(self.differences.values())[:_MOST],
            states=tuple(self.states.values())[:_MOST],
            lost=tuple(self.lost.values())[:_MOST],
        )


class RegionCall:
    """One call: its forward is noted, and each recompute followed along it."""

    def __init__(
        self,
        total: _Sum,
        modules: Sequence[tuple[str, nn.Module]],
        thread: Thread,
        name_of: NameOf,
    ) -> None:
        self._sum = total
        self._modules = modules
        self._thread = thread
        self._name_of = name_of
        self._wanted = True
        self._forward: _Forward | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward's run."""
        if not self._can_compare():
            yield
            return
        run = _Forward(self.leave_untold, look_at_state(self._modules), python_states())
        with self._watched(run):
            yield
        if self._wanted:
            self._sum.calls += not any(isinstance(one, _Recompute) for one in self._thread.runs)
            run.end(look_at_state(self._modules), python_states())
            self._forward = run

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Around the run of a recompute, which may end early."""
        forward = self._forward
        if forward is None or not self._can_compare():
            yield
            return
        parameters = {
            id(parameter): f"{name}.{inner}" if name else inner
            for name, module in self._modules
            for inner, parameter in module.named_parameters()
        }
        run = _Recompute(
            self.leave_untold,
            Checker(forward.tape.entries, parameters, grad_mode=torch.is_grad_enabled()),
        )
        began, drawn_from = look_at_state(self._modules), python_states()
        try:
            with self._watched(run):
                yield
        finally:  # it may stop early, by an exception
            if self._wanted:
                ended = look_at_state(self._modules)
                for state in changed_again(forward.before, forward.after, began, ended):
                    self._sum.states.setdefault(state.name, state)
                found = _explained(run.checker.difference, forward, drawn_from)
                self._sum.add(run.checker, found)

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

    def __init__(self, untold: Callable[[str], None]) -> None:
        self.tape = Tape()
        self._untold = untold

    def made(
        self,
        entry: Entry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """A call has been noted on the tape."""

    def failed(self, error: Exception) -> None:
        """Looking has failed: the region is not compared any more."""
        self._untold(f"Its results could not be looked at ({type(error).__name__}).")


class _Forward(_Run):
    def __init__(
        self, untold: Callable[[str], None], before: ModuleState, random_before: dict[str, int]
    ) -> None:
        super().__init__(untold)
        self.before = before
        self.after = before
        self._random_before = random_before
        self.drew: dict[str, int] = {}

    def end(self, after: ModuleState, random_after: dict[str, int]) -> None:
        """The forward has ended; only what another run may need is kept."""
        self.after = after
        self.drew = {
            name: state
            for name, state in self._random_before.items()
            if random_after.get(name) != state
        }


class _Recompute(_Run):
    def __init__(self, untold: Callable[[str], None], checker: Checker) -> None:
        super().__init__(untold)
        self.checker = checker

    def made(
        self,
        entry: Entry,
        where: Callable[[], Operation],
        repeat: Callable[[], Fingerprint | None],
    ) -> None:
        """Compare it with the forward's."""
        self.checker.meet(entry, where, repeat)


def _explained(
    difference: Difference | None, forward: _Forward, drawn_from: dict[str, int]
) -> Difference | None:
    """A difference whose operators do not explain it, where Python's random numbers do."""
    if difference is None or difference.kind not in (
        "operators",
        "value",
        "argument",
        "input",
        "shape",
    ):
        return difference
    other = [name for name, state in forward.drew.items() if drawn_from.get(name) != state]
    return replace(difference, kind="random", generator=other[0]) if other else difference
