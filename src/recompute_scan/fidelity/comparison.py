"""One step compared: the forward of each region with each of its recomputes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import nn

from recompute_scan.fidelity.lost_gradients import (
    Application,
    Applied,
    HandedTensors,
    Leaving,
    Passing,
    see_what_is_handed,
)
from recompute_scan.fidelity.operators import tensors
from recompute_scan.fidelity.runs import ForwardRun, PartRun, RecomputeRun, Shown
from recompute_scan.fidelity.state import (
    Reach,
    changed_again,
    look_at_state,
    named_weights,
    python_states,
)
from recompute_scan.fidelity.tape import (
    Around,
    ComparedStep,
    NameOf,
    RegionRun,
    Thread,
    Watch,
    nodes_so_far,
    watched_already,
)
from recompute_scan.fidelity.tensors import Fingerprint, fingerprint, unseen
from recompute_scan.result.fidelity import (
    ComparedRegion,
    Difference,
    Fidelity,
    KeptState,
    LostGradient,
    Operation,
    WhyLost,
)

_ROUNDS = 30
# Takes the result of a run of a region.
Returned = Callable[[Any], None]
_OTHER_PARTS = (
    "The function runs its block on parts of its input, and in the backward pass on other parts."
)
Given = list[Fingerprint | None]
# Of one region; a model has the same fault in each layer, and each in its own region.
_MOST = 8


class Comparing:
    """Compares the regions of one step; a failure in it never reaches the script.

    Args:
        name_of: Name and class of a module.
        around: Makes the hooks that torch calls, so that a failure in ours stays with us.
        weights: The names of all parameters, by their numbers.
    """

    def __init__(
        self, name_of: NameOf, around: Around, weights: Callable[[], dict[int, str]] = dict
    ) -> None:
        self._weights = weights
        self._step = ComparedStep(name_of, around)
        self._thread = Thread(self._step)
        self._thread.leaving = self.leaving = Leaving(name_of)
        # Numbers of the weights that no module holds.
        self._unnamed: dict[int, int] = {}
        self._passing: list[tuple[Passing, ComparedRegion, _Sum]] = []
        self._lacking: dict[Applied, tuple[str, ...]] = {}
        self._regions: dict[ComparedRegion, _Sum] = {}
        self._began = perf_counter()

    def region(
        self,
        region: ComparedRegion,
        function: object,
        modules: Sequence[nn.Module] = (),
        application: Application | None = None,
    ) -> RegionCall:
        """One call of a region, with nothing compared yet; ``function`` is what it runs, and
        ``application`` the call of the script's autograd function around it.
        """
        total = self._regions.setdefault(region, _Sum())
        named = [(self._step.name_of(module)[0], module) for module in modules]
        passing = None
        if application is not None:

            def tell(why: WhyLost) -> None:
                total.left.append(LostGradient("", _backward_of(region), why))

            passing = Passing(application, self._step.around, tell)
            self._passing.append((passing, region, total))
        reach = total.reach(function, named)
        non_reentrant = region.variant == "non-reentrant"
        return RegionCall(total, named, reach, self._thread, passing, non_reentrant)

    def hand_over(self, hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        """A checkpoint is about to put its hooks in place, and to run what it checkpoints."""
        if self._step.under_way:
            self._thread.handed = see_what_is_handed(hooks, self._step.around)

    def outcome(self) -> Fidelity:
        """The outcome, when the step has ended."""
        self._step.under_way = False
        took = perf_counter() - self._began
        self.leaving.end()
        if self.leaving.untold is not None:
            for region, total in self._regions.items():
                if region.variant != "non-reentrant":
                    total.untold[self.leaving.untold] = None
        untrained = self._settle_lost()
        regions = tuple(total.of(region) for region, total in self._regions.items())
        keeping = None
        if any(region.recomputes for region in regions):
            with suppress(RuntimeError):  # a GPU that cannot be asked now
                keeping = unseen(cost_of_keeping)
        return Fidelity(regions, took * 1e3, keeping_us=keeping, untrained=untrained)

    def differentiated(self, *, to_all: bool) -> None:
        """A backward pass has ended: note the weights that lack a gradient now; with ``to_all``
        every weight behind it should have one.
        """
        names = functools.cache(self._weights)

        def called(weights: Iterable[int]) -> tuple[str, ...]:
            known, unnamed = names(), self._unnamed
            return tuple(
                known.get(one) or f"weight {unnamed.setdefault(one, len(unnamed) + 1)} in no module"
                for one in weights
            )

        passing, self._passing = self._passing, []
        for one, region, total in passing:
            lacking = one.without_gradient()
            if lacking and to_all:
                where = _backward_of(region)
                total.left.append(LostGradient("", where, "weights-left-out", called(lacking)))
        for applied in self.leaving.all:
            if applied.lost:
                weights = {key: ref() for key, ref in applied.weights.items()}
                self._lacking[applied] = called(
                    key for key, one in weights.items() if one is not None and one.grad is None
                )

    def _settle_lost(self) -> tuple[str, ...]:
        """Give the regions their losses; returns the weights that have no gradient at all."""
        untrained: dict[str, None] = {}
        for applied in self.leaving.all:
            lacking = self._lacking.get(applied, ())
            if applied.alone and lacking:
                untrained |= dict.fromkeys(lacking)
                continue
            for name, used in applied.lost.items():
                if applied.report is not None:
                    applied.report(LostGradient(name, used, "left-without", lacking))
        return tuple(untrained)


class _Sum(Struct):
    """All calls of one region."""

    calls: int = 0
    recomputes: list[Shown] = field(default_factory=list)
    untold: dict[str, None] = field(default_factory=dict)
    states: dict[str, KeptState] = field(default_factory=dict)
    left: list[LostGradient] = field(default_factory=list)
    _modules: Sequence[tuple[str, nn.Module]] = ()
    _reach: tuple[object, Reach] | None = None

    def reach(self, function: object, modules: Sequence[tuple[str, nn.Module]]) -> Reach:
        """The state that this function, around these modules, may change; often the last call's."""
        code = _identity(function)
        known = len(modules) == len(self._modules) and all(
            one is other for (_, one), (_, other) in zip(modules, self._modules, strict=True)
        )
        if self._reach is None or not known or self._reach[0] != code:
            self._modules, self._reach = modules, (code, Reach(function, modules))
        return self._reach[1]

    def of(self, region: ComparedRegion) -> ComparedRegion:
        """The outcome of the step, when its backward passes have ended."""
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
        # A function may run its block once more without autograd, as to see that it is the same.
        followed = {one.forward for one in self.recomputes if one.grad_mode}
        only = [one for one in self.recomputes if one.grad_mode or one.forward not in followed]
        for gone in (*(gone for one in only for gone in one.lost), *self.left):
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
            states=tuple(sorted(self.states.values(), key=lambda one: not one.is_buffer))[:_MOST],
            lost=tuple(lost.values())[:_MOST],
        )


def _identity(function: object) -> object:
    """An identity that two functions share if they refer to the same variables."""
    if isinstance(function, FunctionType):
        cells = tuple(id(cell) for cell in function.__closure__ or ())
        return id(function.__code__), cells, tuple(map(id, function.__defaults__ or ()))
    return id(function)


class RegionCall(Struct, eq=False):
    """One call: its forward is noted, and each recompute followed along it."""

    _sum: _Sum
    _modules: Sequence[tuple[str, nn.Module]]
    _reach: Reach
    _thread: Thread
    _passing: Passing | None
    _non_reentrant: bool
    _wanted: bool = True
    _forwards: list[tuple[ForwardRun, Given]] = field(default_factory=list)

    @property
    def in_backward(self) -> bool:
        """Whether the backward of the script's autograd function around it runs."""
        return self._passing is not None and self._passing.under_way

    @contextmanager
    def forward(self, given: Sequence[object] = ()) -> Iterator[Returned | None]:
        """Around a run in the forward with these arguments; a function that cuts what it gets into
        parts makes several.
        """
        passing = self._passing
        with self._compared_forward(given) as returned:
            ran = None if passing is None else functools.partial(passing.ran, given)
            yield _both(returned, ran)

    @contextmanager
    def _compared_forward(self, given: Sequence[object]) -> Iterator[Returned | None]:
        handed = self._claim()
        if not self._can_compare():
            yield None
            return
        prints = unseen(_prints_of, given)
        run = ForwardRun(self.leave_untold, handed, look_at_state(self._reach), self._drawn_from())
        with self._watched(run), self._leaving() as returned:
            yield returned if self._non_reentrant else _both(returned, run.returned)
        if self._wanted:
            again = any(isinstance(one, RecomputeRun) for one in self._thread.runs)
            self._sum.calls += not (again or self._forwards)
            run.end(look_at_state(self._reach), self._drawn_from())
            self._forwards.append((run, prints))

    def _forward_of(self, given: Sequence[object]) -> ForwardRun | None:
        """The run in the forward that a recompute with these arguments repeats."""
        if len(self._forwards) < 2:
            return self._forwards[0][0] if self._forwards else None
        prints = unseen(_prints_of, given)
        for run, known in self._forwards:
            if len(known) == len(prints) and all(map(_same, known, prints)):
                return run
        self.leave_untold(_OTHER_PARTS)
        return None

    @contextmanager
    def recompute(self, given: Sequence[object] = ()) -> Iterator[Returned | None]:
        """Around the run of a recompute, which may end early; takes its result."""
        passing, first = self._passing, nodes_so_far()
        with self._compared_recompute(given) as returned:
            ran = None if passing is None else functools.partial(passing.recomputed, given, first)
            yield _both(returned, ran)

    @contextmanager
    def _compared_recompute(self, given: Sequence[object]) -> Iterator[Returned | None]:
        handed = self._claim()
        possible = self._can_compare()
        forward = self._forward_of(given) if possible else None
        if forward is None:
            with self._parts_alone() if possible and self._forwards else nullcontext():
                yield None
            return
        run = RecomputeRun(
            self.leave_untold,
            handed,
            forward,
            self._parameters,
            self._thread.step.around,
            self._drawn_from(),
        )
        began = look_at_state(self._reach)
        try:
            with self._watched(run):
                yield None if self._non_reentrant else run.returned
        finally:  # it may stop early, by an exception
            if self._wanted:
                ended = look_at_state(self._reach)
                for state in changed_again(forward.before, forward.after, began, ended):
                    self._sum.states.setdefault(state.name, state)
                self._sum.recomputes.append(run.shown())

    @contextmanager
    def _parts_alone(self) -> Iterator[None]:
        """Around a recompute on other parts."""
        run = PartRun(self.leave_untold, [one for one, _ in self._forwards])
        with self._watched(run):
            yield
        shown = run.shown()
        if shown is not None:
            self._sum.recomputes.append(shown)

    @contextmanager
    def _leaving(self) -> Iterator[Returned | None]:
        leaving = self._thread.leaving
        if leaving is None or self._non_reentrant:
            yield None
            return
        with leaving.block() as returned:
            if returned is not None:
                leaving.innermost.report = self._sum.left.append
            yield returned

    def _parameters(self) -> dict[int, str]:
        """The names of the parameters that there are now, by their numbers."""
        return {
            id(parameter): f"{name}.{inner}" if name else inner
            for name, module in self._modules
            for inner, parameter in named_weights(module)
        }

    def _drawn_from(self) -> dict[str, int]:
        return python_states(self._reach.generators)

    def _claim(self) -> HandedTensors | None:
        """The tensors seen by the checkpoint's hooks, which were put in place just before."""
        handed, self._thread.handed = self._thread.handed, None
        return handed if self._non_reentrant else None

    @contextmanager
    def _watched(self, run: RegionRun) -> Iterator[None]:
        runs = self._thread.runs
        runs.append(run)
        try:
            watched = watched_already(self._thread)
            with nullcontext() if watched else Watch(self._thread):
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


def _both(one: Returned | None, other: Returned | None) -> Returned | None:
    """Calls both, where there are two."""
    if one is None or other is None:
        return one or other

    def returned(result: Any) -> None:
        one(result)
        other(result)

    return returned


def _backward_of(region: ComparedRegion) -> Operation:
    """The backward of the autograd function that runs this region, as a place."""
    return Operation(f"{region.function}.backward", region.module, region.module_class, region.site)


def _prints_of(given: Sequence[object]) -> Given:
    """Fingerprints of the tensors in what a run is called with, weights aside."""
    inputs = [one for one in tensors(given) if not isinstance(one, nn.Parameter)]
    prints = [fingerprint(one) for one in inputs]
    for one in prints:
        if one is not None:
            one.let_go(keep=False)
    return prints


def _same(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    return one is other or (one is not None and other is not None and one.same_bits(other))


def cost_of_keeping() -> float:
    """Time of the host, in µs, for one checkpointed call and its recompute: the least of several.

    A checkpoint reads the state in the forward; for the recompute it reads the present one, puts
    the forward's in place and in the end the present one back (``torch.utils.checkpoint``,
    ``torch.random.fork_rng``), of the CPU and of the GPU that is used, in that device's context.
    This does the same with new generators, so that the script's are left alone. The time that
    torch takes around that in Python comes on top.
    """
    generators = [torch.Generator()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.Generator(f"cuda:{torch.cuda.current_device()}"))
    return 1e6 * min(sum(map(_kept_once, generators)) for _ in range(_ROUNDS))


def _kept_once(generator: torch.Generator) -> float:
    gpu = generator.device if generator.device.type != "cpu" else None
    began = perf_counter()
    states = []
    for put in (None, None, 0, 1):
        with nullcontext() if gpu is None else torch.cuda.device(gpu):
            if put is None:
                states.append(generator.get_state())
            else:
                generator.set_state(states[put])
    return perf_counter() - began
