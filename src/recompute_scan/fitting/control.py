"""The course of a fitted training: measure, plan, switch between two steps, and watch.

The first step recomputes every layer and shows what each one changes. In the second every saved
tensor is looked at. Some steps are timed, the plan is made, and from then on a step costs a call at
its end and the comparison of some shapes.

An arrangement is for shapes: the largest that the step had which was looked at. Steps of another
size class get their own, as soon as a step of it begins; a call larger than any before is
recomputed, and so is the rest of its step.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct
from torch import nn

from recompute_scan import trackers
from recompute_scan.cost.plan import Wish
from recompute_scan.files import write_whole
from recompute_scan.fitting.layer_plan import (
    Decision,
    Measured,
    Times,
    choices_of,
    decide,
    from_first,
    gathered,
    group_of,
    measured,
    trial,
)
from recompute_scan.fitting.layer_switch import STEP, Laps, Layer, Look, Switch, find_layers
from recompute_scan.record.bypass import rearranges
from recompute_scan.record.isolation import Guard, in_forked_processes
from recompute_scan.record.launch import has_process_group
from recompute_scan.record.rehearsal import most_since
from recompute_scan.record.steps import StepCounter, StepHooks, settling
from recompute_scan.result import ActivationPlan
from recompute_scan.result.run_record import Way, fixed_places
from recompute_scan.units import ms, plural, size

_T = TypeVar("_T")
_log = logging.getLogger("recompute_scan.fit")
_TIMED = 3
_MOST_BUCKETS = 12
_MOST_LINES = 5
# Behind so many steps, then twice as many and so on, all ranks ask each other for longer inputs.
_FIRST_MEETING = 32
# Steps between two looks at a GPU's peak, which takes as long as a short operator.
_WATCHED = 50
# After memory ran out, the limit is this share of the planned bytes.
_LOWERED = 0.9
_UNSEEN_STEPS = 20
_MOST_SURPRISES = 3

Shapes = tuple[tuple[int, ...], ...]


class Bucket(Struct):
    """An arrangement and the steps that it is for.

    Attributes:
        shapes: By leading layer, the shapes of the calls in the step that was looked at.
        calls: By layer, how many there were.
        decision: The arrangement.
        measured: This rank's measurements, to plan again with less memory.
    """

    shapes: dict[int, set[Shapes]]
    calls: dict[int, int]
    decision: Decision
    measured: Measured | None

    @property
    def untrained(self) -> frozenset[int]:
        """Layers that no backward pass went through in the step that was looked at."""
        return frozenset() if self.measured is None else fixed_places([self.measured.rehearsal])

    def covers(self, layer: Layer, shapes: Shapes) -> bool:
        """Whether a call is no larger than one of those."""
        return layer.calls <= self.calls.get(layer.place, 0) and any(
            len(one) == len(shapes)
            and all(
                len(mine) == len(its) and all(m <= i for m, i in zip(mine, its, strict=True))
                for mine, its in zip(shapes, one, strict=True)
            )
            for one in self.shapes.get(layer.place, ())
        )


class Fitted:
    """Fits one model; made by :func:`recompute_scan.fit`.

    Attributes:
        settled: The arrangement is in effect.
        steps: Steps that have ended.
    """

    def __init__(self, model: nn.Module, wish: Wish, *, replace: bool, say: bool) -> None:
        self._model = weakref.ref(model)
        self._wish = wish
        self._say = say
        self._guard = Guard("recompute_scan.fit")
        alone = weakref.ref(self)  # what torch holds keeps no model alive
        self._guard.on_failure = lambda: None if (me := alone()) is None else me.stop()
        self._switch = Switch(find_layers(model), self, self._guard)
        self._switch.replace = replace
        self._cuda = False
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._now: Bucket | None = None
        self._looks: list[Look] = []  # at most one, which may outlive this object
        self._course: Iterator[None] = self._settle()
        self._begun = self._quiet = self.settled = False
        self._look_next = self._lost = self._wants = False
        self._shapes: dict[int, set[Shapes]] = {}
        self._first = 0, 0
        self._lines = self._waited = self._surprises = 0
        self._lowered = 1.0
        self._group: Any = None
        self._meeting = _FIRST_MEETING
        self._given: ActivationPlan | None = None
        self.steps = 0

    @property
    def plan(self) -> ActivationPlan | None:
        """The plan in effect; ``None`` before there is one."""
        if self._now is not None:
            return self._now.decision.plan
        return self._given if self.settled else None

    @property
    def failure(self) -> str | None:
        """The bug of ours that ended it, in one sentence; ``None`` without one."""
        return self._guard.failure

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(one.chosen.name for one in self._switch.layers if not one.is_part)

    def save(self, path: str | Path) -> None:
        """Write the plan, for ``fit(..., plan=path)``.

        Raises:
            OSError: The file cannot be written.
        """
        if self.plan is not None:
            write_whole(Path(path), msgspec.json.format(msgspec.json.encode(self.plan), indent=2))

    def start(self, plan: ActivationPlan | None) -> None:
        """Begin with the next step, with a plan that was saved or without one."""
        self._given = plan
        if not self.names:
            self._print(
                "fit found no layers to recompute: no list of like blocks and no large part."
            )
            return
        if rearranges():
            self._print("fit changes nothing here: this run sets the checkpoints.")
            return
        switch, others = self._switch, _owners_in(self._model())
        for other in others:
            if other._model() is not self._model() and other._switch.wholes != switch.wholes:
                self._print(
                    "fit: layers of this model belong to another fitted model, which stays as it "
                    "is; this call changes nothing."
                )
                return
        for other in others:
            other.stop()
        switch.put_on()
        switch.install()
        alone, looks = weakref.ref(self), self._looks

        def boundary() -> None:
            if (me := alone()) is not None:
                me.boundary()
            elif looks:
                looks.pop().finish()
                gone()

        def gone() -> None:
            if not looks:  # else at the end of the step: what autograd calls was put on in order
                hooks.remove(later=True)

        # Steps that were counted wrongly change nothing here.
        hooks = StepHooks(StepCounter(), boundary, lambda: None, self._guard, records=False)
        hooks.install()
        self._stop_hooks = weakref.finalize(self, gone)
        self._stop_hooks.atexit = False
        _FITTED.add(self)
        next(self._course)

    def stop(self) -> None:
        """Make the model what it was."""
        self._end_look()
        _FITTED.discard(self)
        _MEASURING.discard(self)
        settling.discard(self)
        self._quiet = True
        self._switch.remove()
        stop = getattr(self, "_stop_hooks", None)
        if stop is not None:
            stop()

    def boundary(self) -> None:
        """A step has ended."""
        if not self._begun:  # a step of another model
            self._unseen()
            return
        self.steps += 1
        self._begun = False
        for layer in self._switch.layers:
            if layer.leads:
                layer.calls = 0
        if self._quiet and self.steps != self._meeting and self.steps % _WATCHED:
            return
        self._guard.run(self._turn, otherwise=None)

    def enter(self, layer: Layer, args: Any, kwargs: Any) -> None:
        """A leading layer is called: is the step larger than what its arrangement is for?"""
        layer.calls += 1
        try:
            given = (*args, *kwargs.values()) if kwargs else args
            shapes = tuple(one.shape for one in given if isinstance(one, torch.Tensor))
            if self._begun and shapes == layer.known and layer.calls <= layer.most:
                return
        except Exception:  # a tensor of the script's with another shape
            shapes = ()
        self._guard.run(lambda: self._entered(layer, shapes), otherwise=None)

    def met(self) -> None:
        """A checkpoint of the script around a layer, or inside one, is called."""
        self._begun = True

    def ran_out(self, layer: Layer) -> None:
        """Memory ran out in a layer: every other one is recomputed from here on."""
        self._lowered *= 1 if self._lost else _LOWERED
        if not self._lost:
            self._print(
                f"fit: memory ran out in {layer.chosen.name}; every layer is recomputed until the "
                "next plan."
            )
        self._lost, self._quiet = True, False
        self._safe()

    def surprised(self, layer: Layer) -> None:
        """A layer that was never trained is trained now."""
        layer.untrained, self._surprises = False, self._surprises + 1
        self._look_next, self._quiet = self._surprises <= _MOST_SURPRISES, False
        self._safe()

    def _unseen(self) -> None:
        """A step has ended that no layer was called in."""
        settling.discard(self)
        if self._looks:
            self._look_next = self.settled
            self._guard.run(self._end_look, otherwise=None)
        if not self.steps and not self._quiet:
            self._waited += 1
            self._guard.run(self._switch.put_on_compiled, otherwise=None)
            if self._waited == _UNSEEN_STEPS:
                self._print(
                    f"fit has seen no call of a layer in {_UNSEEN_STEPS} steps and changes "
                    "nothing; a model that is compiled as a whole has none."
                )

    def _settle(self) -> Iterator[None]:
        yield
        self._cuda = any(w.is_cuda for one in self._switch.layers for w in one.module.parameters())
        if self._report_theirs():
            self.stop()
            return
        if self._given is not None:
            yield from self._as_given(self._given)
            return
        times: dict[Way, Any] = {}
        while not self._looks:  # until a whole step was looked at
            self._begin_look()
            yield
        runs, shapes, key = self._switch.runs, self._shapes, self._first
        look = self._or_none(self._end_look)
        allocated = None
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        times["recompute"] = yield from self._timed()
        if self._cuda:
            allocated = int(torch.cuda.max_memory_allocated())
        self._switch.runs = runs
        one = self._or_none(lambda: self._measured(look, times, allocated))
        model = self._model()
        self._group = None if model is None else group_of(model)
        for way in ("selective", "parts"):
            tried = None
            if one is not None:
                tried = self._or_none(partial(trial, one, self._wish, way, self._lowered))
            choices = from_first(tried, self._group)
            if choices is not None:
                self._arrange(choices.tolist())
                times[way] = yield from self._timed()
        one = self._or_none(lambda: self._measured(look, times, allocated))
        decision = self._decide(one)
        self._add(key, Bucket(shapes, _calls_of(runs), decision, one))
        fitted = yield from self._timed()
        self._settled(decision, fitted[STEP], times["recompute"][STEP])

    def _timed(self) -> Generator[None, None, Any]:
        """The usual times of the next steps."""
        laps = self._switch.laps = Laps(cuda=self._cuda)
        for _ in range(_TIMED):
            yield
            laps.next_step()
        self._switch.laps = None
        return laps.usual()

    def _as_given(self, plan: ActivationPlan) -> Iterator[None]:
        choices = choices_of(plan, self._switch.layers)
        if choices is None:
            self._print("fit: the plan is for another model; every layer stays recomputed.")
            yield
            return
        calls = {layer.place: layer.most for layer in self._switch.layers if layer.leads}
        self._arrange(choices)
        self._add((0, 0), Bucket(self._shapes, calls, Decision(choices, plan, True), None))
        yield
        self._settled(self._buckets[0, 0].decision, None, None)

    def _turn(self) -> None:
        """At the end of a step that is not like all others."""
        if self._guard.failure is not None:
            return
        if not self.settled:
            with suppress(StopIteration):
                next(self._course)
            return
        self._watch()
        if self._looks:
            self._learn()
        elif self._lost:
            self._plan_again()
        if self._group is not None and self.steps >= self._meeting:
            self._meeting *= 2
            self._look_next |= any(gathered(self._wants, self._group))
        if self._look_next and not self._looks:
            self._look_next = self._wants = False
            self._begin_look()
        self._quiet = not self._looks

    def _entered(self, layer: Layer, shapes: Shapes) -> None:
        first, self._begun = not self._begun, True
        if first:
            if not self.settled:
                settling.add(self)
            elements = sum(map(math.prod, shapes))
            self._first = (layer.place, elements.bit_length())
        if not self.settled or self._looks:
            self._shapes.setdefault(layer.place, set()).add(shapes)
            layer.most = max(layer.most, layer.calls)
            return
        now, new = self._now, False
        if first and self._group is None and not self._lost:
            now = self._buckets.get(self._first)
            new = now is None and len(self._buckets) < _MOST_BUCKETS and self._given is None
            if now is None or not now.covers(layer, shapes):
                now = min(
                    (one for one in self._buckets.values() if one.covers(layer, shapes)),
                    key=lambda one: one.decision.plan.plan.peak_bytes,
                    default=now,
                )
            if now is not None and now is not self._now:
                self._use(now)
        if now is not None and now.covers(layer, shapes) and not new:
            layer.known = shapes
            return
        self._larger(layer, shapes, first=first, new=new)

    def _larger(self, layer: Layer, shapes: Shapes, *, first: bool, new: bool) -> None:
        layer.known = ()
        if self._group is not None:
            self._wants = True
            if any(hasattr(part, "unshard") for part in list(layer.module.modules())[1:]):
                return  # its recompute gathers weights, and other ranks would not
        self._safe()
        if not new:
            self._print(
                f"fit: a call of {layer.chosen.name} is larger than any before; every layer is "
                "recomputed in this step."
            )
        self._quiet = False
        if self._group is None and first:
            self._begin_look()
            self._shapes[layer.place] = {shapes}
            layer.most = layer.calls
        elif self._group is None:
            self._look_next = True

    def _learn(self) -> None:
        """The step that was looked at has ended: it gets its own plan."""
        runs, shapes, key = self._switch.runs, self._shapes, self._first
        look = self._or_none(self._end_look)
        self._switch.runs = runs
        one = self._or_none(lambda: self._measured(look, self._times, self._allocated))
        self._add(key, Bucket(shapes, _calls_of(runs), self._decide(one), one))

    def _plan_again(self) -> None:
        """Memory ran out: every arrangement gets less."""
        self._lost = False
        for bucket in self._buckets.values():
            if bucket.measured is not None and self._group is None:
                bucket.decision = decide([bucket.measured], self._wish, self._lowered)
        if self._group is None and self._now is not None and self._now.measured is not None:
            self._use(self._now)

    def _watch(self) -> None:
        if not self._cuda or self._now is None or self._looks:
            return
        budget = self._now.decision.plan.budget_bytes
        took = int(torch.cuda.max_memory_allocated())
        if budget is not None and took > budget and self._now.decision.fits and not self._lost:
            self._print(f"fit: steps take {size(took)}, which is more than {size(budget)}.")
            self._lowered *= _LOWERED
            self._lost = True
            torch.cuda.reset_peak_memory_stats()

    def _begin_look(self) -> None:
        others = [one for one in _MEASURING if one is not self]
        if any(one._looks for one in others) or (others and self._waited < _UNSEEN_STEPS):
            # One after the other, since what this one may take depends on what that one does.
            self._waited += 1
            self._look_next = self.settled
            return
        _MEASURING.add(self)
        self._safe()
        for layer in self._switch.layers:
            layer.most = 0
        self._shapes = {}
        look = Look(through=True, most_since=most_since if self._cuda else None)
        self._looks.append(look)
        self._switch.look(look)
        look.begin()

    def _end_look(self) -> Look | None:
        if not self._looks:
            return None
        look = self._looks.pop()
        look.finish()
        self._switch.look(None)
        if self.settled:
            _MEASURING.discard(self)
        if look.fault is not None:
            raise look.fault
        return look

    def _or_none(self, ours: Callable[[], _T]) -> _T | None:
        """Its result; ``None`` where it fails and other ranks wait for this one."""
        try:
            return ours()
        except Exception:
            if self._group is None:
                raise
            _log.exception("fit failed on this rank")
            return None

    def _measured(self, look: Look | None, times: Times, allocated: int | None) -> Measured:
        self._times, self._allocated = times, allocated
        if look is None:
            raise RuntimeError("no step was looked at")
        return measured(self._switch, look, times, self._cuda, allocated)

    def _decide(self, one: Measured | None) -> Decision:
        """The same on all ranks: the first one's solver decides."""
        ranks = gathered(one, self._group)
        first = self._group is None or torch.distributed.get_rank(self._group) == 0
        found: Decision | None = None
        if first and None not in ranks:
            found = self._or_none(lambda: decide(ranks, self._wish, self._lowered))
        found = from_first(found, self._group)
        if found is None:
            raise RuntimeError("a rank could not measure its steps")
        return found

    def _add(self, key: tuple[int, int], bucket: Bucket) -> None:
        if self._group is not None:
            self._buckets.clear()
        self._buckets[key] = bucket
        self._use(bucket)

    def _use(self, bucket: Bucket) -> None:
        self._now = bucket
        for layer in self._switch.layers:
            layer.known = ()
            layer.most = bucket.calls.get(layer.place, 0)
            layer.untrained = layer.place in bucket.untrained
        self._arrange(bucket.decision.choices)

    def _arrange(self, choices: Any) -> None:
        self._switch.arrange(choices, settled=self.settled)

    def _safe(self) -> None:
        """Every layer is recomputed from here on."""
        self._switch.arrange([1] * len(self._switch.layers), settled=False)
        for layer in self._switch.layers:
            layer.known = ()

    def _settled(self, decision: Decision, step: float | None, safe: float | None) -> None:
        self.settled = self._quiet = True
        _MEASURING.discard(self)
        settling.discard(self)
        self._switch.laps = None
        self._arrange(decision.choices)
        plan = decision.plan
        point, wholes = plan.plan, len(plan.modules)
        recomputed = point.recomputed or 0
        ways = {
            "kept": wholes - recomputed - point.offloaded - point.in_part,
            "recomputed": recomputed - point.selective,
            "recomputed selectively": point.selective,
            "recomputed in part": point.in_part,
            "offloaded": point.offloaded,
        }
        said = ", ".join(f"{number} {how}" for how, number in ways.items() if number)
        limit, over = "" if plan.budget_bytes is None else f" of {size(plan.budget_bytes)}", ""
        if not decision.fits:
            limit, over = "", f", more than {size(plan.budget_bytes)}: no arrangement takes less"
        took = ""
        if step is not None and safe is not None:
            every = f"{ms(safe)} with every layer recomputed"
            took = f" ({every})" if step < safe else f", measured no faster than the {every}"
            took = f"; a step takes {ms(step)}{took}"
        what = "allocated" if plan.device == "gpu" else "saved for the backward pass"
        text = (
            f"fit: of {plural(wholes, 'layer')} {said}; {size(point.peak_bytes)}{limit} {what}"
            f"{over}{took}, after {plural(self.steps, 'step')}."
        )
        self._print(text)
        scalars = {"fit_step_ms": step or point.step_ms, "fit_bytes": float(point.peak_bytes)}
        trackers.tell(trackers.Note(self.steps, text, scalars))

    def _report_theirs(self) -> bool:
        """Whether the script checkpoints all layers itself."""
        theirs = self._switch.theirs
        if theirs:
            self._print(
                f"fit: the script checkpoints {plural(len(theirs), 'layer')} itself, such as "
                f"{theirs[0]}; these stay as they are. With replace=True fit chooses."
            )
        if not self._switch.replace:
            self._switch.detached()
        return len(theirs) == len(self.names)

    def _print(self, text: str) -> None:
        _log.info("%s", text)
        self._lines += 1
        if self._say and self._lines <= _MOST_LINES:
            with suppress(Exception):
                if not has_process_group() or torch.distributed.get_rank() == 0:
                    print(f"recompute-scan: {text}", file=sys.stderr, flush=True)


def _calls_of(runs: list[tuple[int, int, int]]) -> Counter[int]:
    return Counter(place for place, _, _ in runs)


# Those that have begun to measure and have not settled yet.
_MEASURING: weakref.WeakSet[Fitted] = weakref.WeakSet()
_FITTED: weakref.WeakSet[Fitted] = weakref.WeakSet()


def _owners_in(model: nn.Module | None) -> list[Fitted]:
    """Fitted models that have a module of this one in a layer, in the order of its modules."""
    owners = {
        id(part): one
        for one in list(_FITTED)
        for layer in one._switch.layers
        for part in layer.module.modules()
    }
    modules = () if model is None else model.modules()
    return list(dict.fromkeys(owners[id(one)] for one in modules if id(one) in owners))


def fitted(model: nn.Module) -> Fitted | None:
    """The controller of a model, or of the first fitted model inside it; ``None`` without."""
    return next(iter(_owners_in(model)), None)


def _forked() -> None:
    """A forked process has no training of its parent's."""
    for one in list(_FITTED):
        one.stop()


in_forked_processes(_forked)
