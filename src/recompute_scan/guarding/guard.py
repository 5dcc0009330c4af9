"""Alerts during a whole training, without a profiler.

``recompute_scan.guard()`` watches a training loop; ``run --guard`` watches an unchanged script to
its end.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

import msgspec
import torch
from torch import nn

from recompute_scan.errors import RunError, UsageError
from recompute_scan.files import write_whole
from recompute_scan.guarding.alerts import Listening, Pace, Sampling, tell, with_pace
from recompute_scan.guarding.counters import CheckpointHooks, RegionNames, Trained, seen_step
from recompute_scan.guarding.judge import (
    Change,
    Judge,
    Stored,
    TalliedRegion,
    Tallies,
    Training,
    read_stored,
    sentence,
    write_stored,
)
from recompute_scan.record.attribution import CallSites
from recompute_scan.record.execute import Exit, run_program
from recompute_scan.record.isolation import Guard
from recompute_scan.record.launch import rank_facts
from recompute_scan.record.modules import ModuleIndex
from recompute_scan.record.options import cannot_write
from recompute_scan.record.steps import EXPLICIT, StepCounter, StepHooks

LEARNING = 20
SAMPLE_EVERY = 100
_log = logging.getLogger("recompute_scan.guard")


class StandingGuard:
    """A guard over a whole training: sends alerts when recomputes change.

    Use it in a ``with`` statement around the training, or call its ``start`` and ``stop``. Steps
    end with the optimizer's, or where its ``step`` is called. It logs to ``recompute_scan.guard``,
    calls the callbacks and, unless ``on_change`` asks for it, raises nothing into the training.

    Args:
        baseline: A file with what is usual. Where it exists, the first step is compared with it
            already, as after a resume; it is written when the guard stops.
        learning: Steps that the usual recomputes are learned from, where there is no such file.
        sample_every: Steps between two calls that are compared with their recompute; 0 for never.
        sample_share: The largest share of the training's time that comparing may take, from which
            the distance grows; ``None`` for any.
        on_change: ``alert`` sends an alert; ``raise`` also raises an error at the step's end
            (``E352``), once for each change.
        callbacks: Called with each :class:`~recompute_scan.guarding.judge.Change`.
        trackers: Whether W&B, MLflow, TensorBoard and trackio get alerts too, where the script has
            a run or a writer of theirs open.

    Attributes:
        changes: The alerts so far.
        callbacks: Each is called with every change from here on.
        stored: The usual recomputes, as read at the start and as learned by the end.

    Raises:
        UsageError: A number is out of range, or ``on_change`` is neither (``E234``).
    """

    def __init__(
        self,
        *,
        baseline: str | Path | None = None,
        learning: int = LEARNING,
        sample_every: int = SAMPLE_EVERY,
        sample_share: float | None = 0.0005,
        on_change: Literal["alert", "raise"] = "alert",
        callbacks: Sequence[Listening] = (),
        trackers: bool = True,
    ) -> None:
        if learning < 1 or sample_every < 0 or on_change not in ("alert", "raise"):
            raise UsageError(
                "E234",
                "learning must be at least 1, sample_every at least 0, and on_change "
                '"alert" or "raise".',
            )
        self._baseline = None if baseline is None else Path(baseline)
        self._learning = learning
        self._on_change = on_change
        self.changes: list[Change] = []
        self.callbacks = list(callbacks)
        self._trackers = trackers
        self._guard = Guard()
        self._undo = ExitStack()
        self.stored = Stored({})
        self._every = sample_every
        self._share = sample_share
        self._under_way = False

    def __enter__(self) -> StandingGuard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def steps(self) -> int:
        """Steps that have ended, with the steps of earlier runs where the baseline has them."""
        return self._judge.step if self._under_way else self.stored.steps

    @property
    def failure(self) -> str | None:
        """The bug of ours that ended the guard, in one sentence; ``None`` without one."""
        return self._guard.failure

    def start(self) -> StandingGuard:
        """Begin to count. Does nothing where it is on.

        Raises:
            InputError: The baseline cannot be read (``E351``).
        """
        if self._under_way:
            return self
        if self._baseline is not None and self._baseline.exists():
            self.stored = read_stored(self._baseline)
        self._guard = Guard()
        self._guard.on_failure = self._undo.close  # all of it, also where a part fails
        self._under_way = self._guard.run(self._begin, otherwise=False)
        return self

    def _begin(self) -> bool:
        self._process = os.getpid()
        self._trained = Trained(self.stored.trained)
        self._pace = Pace()
        index = ModuleIndex()
        self._names = RegionNames(index)
        self._tallies = Tallies(CallSites(Path.cwd()))
        self._judge = Judge(
            0 if self.stored.modules else self._learning,
            self.stored.modules,
            self._training,
            self._trained.then,
            self.stored.steps,
        )
        self._learned_at = None if self.stored.modules else self.stored.steps + self._learning
        self._explicit = False
        self._sampling = Sampling(index, self._guard, self._every, self._share)
        self._undo.callback(self._sampling.drop)
        self._hooks = CheckpointHooks(self._tallies, self._guard, self._failed)
        self._undo.callback(self._hooks.remove)
        self._hooks.install()
        self._counter, self._recount = StepCounter(), False
        self._steps = StepHooks(self._counter, self.boundary, self.restart, self._guard)
        self._undo.callback(partial(self._steps.remove, later=True))  # perhaps one of them fails
        self._steps.install()
        return True

    def step(self) -> None:
        """A training step has ended. Where this is called, steps of optimizers no longer count.

        Raises:
            RunError: With ``on_change="raise"``, something has changed (``E352``).
        """
        if not self._under_way or os.getpid() != self._process:
            return
        if not self._explicit:
            self._explicit = True
            self._guard.run(self._steps.remove, otherwise=None)
            self._counter.saw(EXPLICIT)
            self._recount = True
        self._guard.run(self.boundary, otherwise=None)

    def stop(self) -> None:
        """Take everything out of the process again, and write the baseline where one is kept."""
        if not self._under_way or os.getpid() != self._process:
            return
        self._under_way = False
        self._guard.run(self._steps.remove, otherwise=None)
        self._guard.run(self._undo.close, otherwise=None)
        self._guard.run(self._keep, otherwise=None)

    def _keep(self) -> None:
        self.stored = Stored(
            self._judge.usual(),
            torch=str(torch.__version__),
            steps=self._judge.step,
            trained=self._trained.names(),
        )
        if self._baseline is not None and self.stored.modules:
            try:
                write_stored(self._baseline, self.stored)
            except OSError as error:
                _log.warning("The baseline %s cannot be written: %s", self._baseline, error)

    def restart(self) -> None:
        """Another optimizer ends a step than was thought, so that steps were counted twice."""
        self._recount = True

    def boundary(self) -> None:
        """A step has ended: look at its recomputes, and send an alert for each change.

        In most steps the guard does no more, and each function called here would take
        some microseconds, because the step itself has left nothing of ours in the caches.
        """
        if self._guard.failure is not None:
            return
        self._pace.ends.append(perf_counter())
        judge, regions = self._judge, self._tallies.regions
        if self._recount:
            self._recount = False
            judge.recount(self._counter.steps - 1)
        moved = not judge.settled
        for region in regions:
            bits = (
                (region.recomputed > region.handed_on)
                | (region.again > 0) << 1
                | (region.nested > 0) << 2
                | bool(region.keeps_random) << 3
            )
            if bits != region.bits:
                region.bits, moved = bits, True
        found: list[Change] = []
        if moved:
            found = self._seen(regions)
        else:
            judge.step += 1
        for region in regions:
            region.entered = region.nested = region.recomputed = region.again = 0
            region.handed_on = 0
        if judge.step == self._learned_at:
            self._trained.remember()
            self._pace.look_at_memory()
        if regions and judge.step >= self._sampling.due:
            sampled = self._sampling.step(judge.step, regions, self._pace)
            found = found if sampled is None else [*found, self._unfaithful(*sampled)]
        for change in found:
            self._tell(with_pace(change, self._pace))

    def _seen(self, regions: list[TalliedRegion]) -> list[Change]:
        self._names.give(regions)
        found = self._judge.see(seen_step(regions))
        self._tallies.forget_gone()
        self._trained.let_go()
        return found

    def _tell(self, change: Change) -> None:
        self.changes.append(change)
        tell(self.changes, self.callbacks, on_trackers=self._trackers)
        if self._on_change == "raise":
            raise RunError("E352", change.text, hint='on_change="alert" sends alerts only')

    def _training(self, name: str) -> Training:
        modules = [one.module for one in self._tallies.regions if one.name == name]
        alive: list[nn.Module] = [one for one in modules if one is not None]
        return self._trained.now(name, alive, self._judge.step)

    def _unfaithful(self, region: TalliedRegion, said: list[str]) -> Change:
        step, modules = self._judge.step, (region.name or region.function,)
        sites = (region.site,) if region.site else ()
        text = sentence("unfaithful", step, modules, sites, (), (), "; ".join(said[:2]))
        return Change("unfaithful", step, step, modules, sites, 1, 1, text)

    def _failed(self, error: BaseException) -> None:
        def fail() -> None:
            raise error

        self._guard.run(fail, otherwise=None)


guard = StandingGuard  # as people call it

FORMAT = "recompute-scan-guarded/1"


def run_guarded(
    target: str,
    is_module: bool,
    args: Sequence[str],
    folder: Path,
    callbacks: Sequence[Listening] = (),
) -> tuple[StandingGuard | None, Exit]:
    """The guard of a whole run, and how the script ended; ``None`` where a bug of ours has kept the
    guard from beginning, and the script ran without it.

    The usual recomputes are kept in ``guard-rankN.json`` of the folder: the next run there is
    compared with this one from its first step on. The alerts are in ``guarded-rankN.json``.

    Raises:
        UsageError: No such script (``E202``) or module (``E203``), or a folder that cannot be
            written (``E206``).
        InputError: The folder's baseline cannot be read (``E351``).
    """
    folder = folder.absolute()  # the script may change the current directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    shelter = Guard()
    standing = shelter.run(partial(_started, folder, callbacks), otherwise=None)
    try:
        ended = run_program(target, is_module, args)
    finally:
        if standing is not None:
            shelter.on_failure = standing._undo.close
            shelter.run(standing.stop, otherwise=None)
    if standing is not None:
        shelter.run(partial(_write_told, folder, standing), otherwise=None)
    return standing, ended


def _started(folder: Path, callbacks: Sequence[Listening]) -> StandingGuard:
    baseline = folder / f"guard-rank{rank_facts().rank}.json"
    return guard(baseline=baseline, callbacks=callbacks).start()


def _write_told(folder: Path, standing: StandingGuard) -> None:
    told = {
        "format": FORMAT,
        "steps": standing.steps,
        "changes": msgspec.to_builtins(standing.changes),
        "failure": standing.failure,
    }
    path = folder / f"guarded-rank{rank_facts().rank}.json"
    write_whole(path, json.dumps(told, indent=2).encode() + b"\n")
