"""The phases of a recording, driven by step boundaries.

Warm-up, then timed steps without a profiler, then what
:class:`~recompute_scan.record.tracing.Tracing` profiles, then one step that is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from recompute_scan.faithful import Fidelity
from recompute_scan.record.compat import compiled_something
from recompute_scan.record.execute import StopRecording
from recompute_scan.record.guard import Guard
from recompute_scan.record.launch.launcher import RankFacts
from recompute_scan.record.launch.membership import Membership
from recompute_scan.record.phase import Phase, RecordedSoFar
from recompute_scan.record.quiet import Progress, without_own_warnings
from recompute_scan.record.scope import DEFAULT, Plan, Seen
from recompute_scan.record.steps import StepCounter, StepTimer, in_backward
from recompute_scan.record.tracing import DecidingStep, Tracing
from recompute_scan.record.verify.gauges import PeakMemory

_COMPILED = Fidelity(
    untold="Part of the step is compiled, and compiled code runs no operators that could be "
    "compared."
)


def _hidden() -> Fidelity | None:
    """Why nothing can be compared, where something is compiled."""
    return _COMPILED if compiled_something() else None


class ComparedStep(Protocol):
    """What compares the recomputes of a step with their forward."""

    def compare(self) -> None:
        """The step begins."""

    def compared(self) -> Fidelity:
        """It has ended: what it has shown."""


class Recorder:
    """Records one rank of a run.

    Attributes:
        kept: What has been kept so far.
        others: Sees profilers of the script's own.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        device: Literal["auto", "cpu", "cuda"],
        keep_going: bool,
        counter: StepCounter,
        begin_annotating: Callable[[], None],
        comparison: ComparedStep | None = None,
        policies: DecidingStep | None = None,
        memory: PeakMemory | None = None,
        recording_ranks: str = DEFAULT,
        on_kept: Callable[[], None] = lambda: None,
        guard: Guard | None = None,
        follow: Callable[[Phase, int, int], None] = lambda *_: None,
    ) -> None:
        self._follow = follow
        self._guard = guard or Guard()
        self._thread = threading.get_ident()
        self._plan = plan
        self._wanted_device = device
        self._keep_going = keep_going
        self._counter = counter
        self._comparison = comparison if plan.fidelity else None
        self._begin_annotating = begin_annotating
        self._memory = memory
        self._on_kept = on_kept
        self._membership = Membership(plan, recording_ranks)
        self._progress = Progress(wanted=self.ranks.rank == 0)
        self.kept = RecordedSoFar(folder)
        self._timer: StepTimer | None = None
        self._tracing = Tracing(
            plan,
            self.kept,
            self._membership,
            counter=counter,
            progress=self._progress,
            begin_annotating=begin_annotating,
            on_kept=on_kept,
            guard=self._guard,
            policies=policies,
        )
        self.others = self._tracing.others

    @property
    def ranks(self) -> RankFacts:
        """This process among the others, as last known."""
        return self._membership.ranks

    @property
    def store(self) -> Any | None:
        """The store of the script's process group, once the warm-up is over."""
        return self._membership.store

    @property
    def chosen(self) -> bool:
        """Whether this rank is to record; known once the warm-up is over."""
        return self._membership.chosen

    @property
    def done(self) -> bool:
        """Whether nothing more will be recorded, if this rank was to record at all."""
        return self.kept.phase is Phase.DONE

    @property
    def idle(self) -> bool:
        """Whether this rank records nothing from here on."""
        return self.kept.phase in (Phase.DONE, Phase.COUNTING)

    @property
    def timed(self) -> int | None:
        """Steps timed so far; ``None`` while none is."""
        return self._timer.steps if self._timer and self.kept.phase is Phase.TIMING else None

    @property
    def over(self) -> bool:
        """Need nobody go on? One of several ranks stops when the others do, whatever became of
        its own recording.
        """
        if self._membership.alone:
            return self.done and self._guard.failure is None
        return self._membership.last_step.passed(self._counter.steps)

    @property
    def bug(self) -> str | None:
        """The bug of ours that ended the recording, in one sentence."""
        return self._guard.failure

    @property
    def seen(self) -> Seen:
        """How far the recording has come."""
        return Seen(
            made=self._counter.steps,
            profiled=self.kept.profiled,
            # Or none are wanted any more: a warning says why.
            stacks=self.kept.stacks is not None or self.kept.phase is Phase.DONE,
            explicit=self._counter.explicit,
            waited=self._tracing.waited,
        )

    def restart(self) -> None:
        """Steps were counted wrongly until now: warm up again, drop what was timed."""
        if self.kept.phase is Phase.DONE:
            return
        if self.kept.trace is not None:
            self.kept.warn(
                "recompute_scan.step() was first called when the trace was already recorded: the "
                "steps in it are optimizer steps."
            )
            return
        self._tracing.drop()
        self._timer = None
        self.kept.timed_ms = ()
        self.kept.phase = Phase.WARMUP

    def boundary(self) -> None:
        """A step has ended.

        Raises:
            StopRecording: Everything is recorded and the script need not go on.
        """
        if self.kept.phase is not Phase.DONE:
            with without_own_warnings():
                self._guard.run(self._advance_or_fail, otherwise=None)
        if self._guard.failure is not None:
            self._guard.run(self.settle, otherwise=None)
        if not self._keep_going and self.over:
            raise StopRecording(0)

    def finish(self) -> None:
        """The script has ended: keep what an open window holds."""
        with without_own_warnings():
            self._guard.run(self._keep_window_or_fail, otherwise=None)
            self._guard.run(self._end_comparison, otherwise=None)
        if self._timer is not None and not self.kept.timed_ms:
            with suppress(RuntimeError):  # a GPU that died with the script
                self._keep_times(self._timer)
        if self.kept.phase is Phase.WARMUP:
            self.kept.warmup_steps = self._counter.steps
            self._membership.look()

    def give_up(self) -> None:
        """A bug of ours has shown: nothing more is recorded, what is kept is kept."""
        self.kept.failure = self._guard.failure
        self.kept.phase = Phase.DONE
        self._membership.go_on(self._counter.steps)

    def settle(self) -> None:
        """Stop the profiler of a recording that was given up; between steps, in its thread."""
        if threading.get_ident() == self._thread and not in_backward():
            with without_own_warnings():
                self._tracing.drop()

    def abandon(self) -> None:
        """The script hangs in another thread: keep the step times, and touch nothing else."""
        if self._timer is not None and not self.kept.timed_ms and self.kept.device == "cpu":
            self.kept.timed_ms = self._timer.milliseconds()
        if self.kept.phase is Phase.WARMUP:
            self.kept.warmup_steps = self._counter.steps

    def _keep_window_or_fail(self) -> None:
        try:
            self._tracing.keep()
        except OSError as error:
            self._fail(error)

    def _advance_or_fail(self) -> None:
        try:
            self._advance()
        except OSError as error:  # a disk that is full, a folder that has gone
            self._fail(error)

    def _advance(self) -> None:
        if self.kept.phase is Phase.WARMUP:
            self._after_warmup_step()
        elif self.kept.phase is Phase.TIMING and self._timer is not None:
            self._timer.mark()
            if self._timer.steps >= self._plan.timing:
                self._keep_times(self._timer)
                if self._plan.steps:
                    self._tracing.open(lead=self._plan.lead)
                else:
                    self.kept.phase = Phase.DONE
        elif self.kept.phase is Phase.WAITING:
            self._tracing.open(lead=self._plan.lead)
        elif self.kept.phase is Phase.COUNTING:
            self._counter.freeze()  # now, as where a window has begun
        elif self.kept.phase is Phase.COMPARING:
            self._end_comparison()
        else:
            self._tracing.step()
        if self.kept.phase is Phase.DONE:
            self._begin_comparison()
        self._report()

    def _begin_comparison(self) -> None:
        """All that a profiler records is there: one more step is compared, once."""
        kept = self.kept
        if self._comparison is None or kept.fidelity is not None:
            return
        if kept.trace is None and (not self._plan.only_compares or kept.failure is not None):
            return
        kept.fidelity = _hidden()
        if kept.fidelity is None:
            self._comparison.compare()
            kept.phase = Phase.COMPARING

    def _end_comparison(self) -> None:
        if self.kept.phase is Phase.COMPARING and self._comparison is not None:
            self.kept.phase = Phase.DONE
            found = self._comparison.compared()
            # What is compiled in that very step hides its operators as well.
            self.kept.fidelity = _hidden() or found
            self._on_kept()

    def _after_warmup_step(self) -> None:
        made, plan = self._counter.steps, self._plan
        if made >= plan.warmup:
            self._settle_device()
            self.kept.warmup_steps = made
            self._on_kept()  # little, but who is killed while steps are timed has left a word
            if plan.timing:
                if self._memory is not None:
                    self._memory.begin(self.kept.device)
                self._timer = StepTimer(self.kept.device)
                self.kept.phase = Phase.TIMING
            elif plan.only_compares:
                self._compare_alone()
            else:
                self._tracing.open(lead=0)
        elif plan.steps and plan.timing == 0 and made == plan.warmup - 1:
            self._settle_device()
            self.kept.warmup_steps = plan.warmup
            self._tracing.open(lead=1)

    def _compare_alone(self) -> None:
        """Nothing is timed or profiled: the next step is compared, on the chosen ranks."""
        if not self._membership.chosen:
            self.kept.phase = Phase.COUNTING
            return
        self._membership.last_step.settle(self._counter.steps, 1)
        self._counter.freeze()
        self._begin_annotating()
        self.kept.phase = Phase.DONE

    def _keep_times(self, timer: StepTimer) -> None:
        self.kept.timed_ms = timer.milliseconds()
        if self._memory is not None:
            self._memory.end()
        self._on_kept()

    def _settle_device(self) -> None:
        # Asked only now, and only whether the script itself has started CUDA: to start it here
        # would break a script that forks later, and would record a GPU that nobody uses.
        if warning := self._membership.settle(self.kept.folder):
            self.kept.warn(warning)
        if self.ranks.rank != 0:
            self._progress.end()
        wanted = self._wanted_device
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.kept.device = "cuda" if used and wanted != "cpu" else "cpu"
        if wanted == "cuda" and not used:
            self.kept.warn(
                "The script did not use a GPU in its warm-up steps; the CPU was recorded."
            )

    def _fail(self, error: Exception) -> None:
        self.kept.failure = f"Recording was given up: {type(error).__name__}: {error}"
        self.kept.phase = Phase.DONE
        self._tracing.drop()

    def _report(self) -> None:
        self._follow(self.kept.phase, self._counter.steps, self.ranks.rank)
        if text := self.kept.phase.described(self._plan):
            self._progress.show(text)
