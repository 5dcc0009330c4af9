"""The phases of a recording, driven by step boundaries.

Warm-up, then timed steps without a profiler, then profiled steps without stacks, then one with
stacks, for the call sites only. What a window holds is written as soon as it closes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from recompute_scan.faithful import Fidelity
from recompute_scan.record.compat import compiled_something, stacks_crash
from recompute_scan.record.execute import StopRecording
from recompute_scan.record.guard import Guard
from recompute_scan.record.launch.collect import mark_folder
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.launch.peers import LastStep, store_of_group
from recompute_scan.record.profiler import OtherProfilers, ProfilerWindow
from recompute_scan.record.quiet import Progress
from recompute_scan.record.ranges import still_open
from recompute_scan.record.scope import DEFAULT, Plan, Seen, chosen
from recompute_scan.record.steps import StepCounter, StepTimer, in_backward
from recompute_scan.record.verify.gauges import PeakMemory

_COMPILED = (
    "Part of the step is compiled, and compiled code runs no operators that could be compared."
)


class Phase(Enum):
    """What the steps that pass now are for."""

    WARMUP = auto()
    TIMING = auto()
    WAITING = auto()  # for a profiler of the script's own to end
    TRACE = auto()
    STACKS = auto()
    COMPARING = auto()
    COUNTING = auto()  # on a rank that is not to record
    DONE = auto()


class ComparedStep(Protocol):
    """What compares the recomputes of a step with their forward."""

    def compare(self) -> None:
        """The step begins."""

    def compared(self) -> Fidelity:
        """It has ended: what it has shown."""


class Recorder:
    """Records one rank of a run.

    Attributes:
        device: ``cpu`` or ``cuda``, known once the warm-up is over.
        warmup_steps: Steps before the first timed or profiled one.
        timed_ms: Durations of the timed steps.
        trace: File name of the trace, once written.
        stacks: File name of the trace with stacks, once written.
        profiled: Complete steps in the trace.
        fidelity: What comparing a step has shown, if one was.
        chosen: Whether this rank is to record; known once the warm-up is over.
        store: The store of the script's process group, once the warm-up is over.
        ranks: This process among the others, as last known.
        warnings: What the person should know.
        failure: Why recording had to be given up.
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
        memory: PeakMemory | None = None,
        recording_ranks: str = DEFAULT,
        on_kept: Callable[[], None] = lambda: None,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard or Guard()
        self._thread = threading.get_ident()
        self._plan = plan
        self._folder = folder
        self._wanted_device = device
        self._keep_going = keep_going
        self._counter = counter
        self._begin_annotating = begin_annotating
        self._comparison = comparison if plan.fidelity else None
        self._memory = memory
        self._recording_ranks = recording_ranks
        self._on_kept = on_kept
        self._last_step = LastStep(plan.wanted)
        self.chosen = True
        self.store: Any | None = None
        self.ranks = rank_facts()
        self._progress = Progress(wanted=self.ranks.rank == 0)
        self._phase = Phase.WARMUP
        self._timer: StepTimer | None = None
        self._window: ProfilerWindow | None = None
        self.others = OtherProfilers(self._give_way, self._guard)
        self.device: Literal["cpu", "cuda"] = "cpu"
        self.warmup_steps = 0
        self.timed_ms: tuple[float, ...] = ()
        self.trace: str | None = None
        self.stacks: str | None = None
        self.profiled = 0
        self.fidelity: Fidelity | None = None
        self.warnings: list[str] = []
        self.failure: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will be recorded, if this rank was to record at all."""
        return self._phase is Phase.DONE

    @property
    def idle(self) -> bool:
        """Whether this rank records nothing from here on."""
        return self._phase in (Phase.DONE, Phase.COUNTING)

    @property
    def timed(self) -> int | None:
        """Steps timed so far; ``None`` while none is."""
        return self._timer.steps if self._timer and self._phase is Phase.TIMING else None

    @property
    def over(self) -> bool:
        """Need nobody go on? One of several ranks stops when the others do, whatever became of
        its own recording.
        """
        if self.ranks.world_size == 1:
            return self.done and self._guard.failure is None
        return self._last_step.passed(self._counter.steps)

    @property
    def bug(self) -> str | None:
        """The bug of ours that ended the recording, in one sentence."""
        return self._guard.failure

    @property
    def seen(self) -> Seen:
        """How far the recording has come."""
        return Seen(
            made=self._counter.steps,
            profiled=self.profiled,
            # Or none are wanted any more: a warning says why.
            stacks=self.stacks is not None or self._phase is Phase.DONE,
            explicit=self._counter.explicit,
        )

    def restart(self) -> None:
        """Steps were counted wrongly until now: warm up again, drop what was timed."""
        if self._phase is Phase.DONE:
            return
        if self.trace is not None:
            self._warn(
                "recompute_scan.step() was first called when the trace was already recorded: the "
                "steps in it are optimizer steps."
            )
            return
        self._drop_window()
        self._timer = None
        self.timed_ms = ()
        self._phase = Phase.WARMUP

    def boundary(self) -> None:
        """A step has ended.

        Raises:
            StopRecording: Everything is recorded and the script need not go on.
        """
        if self._phase is not Phase.DONE:
            self._guard.run(self._advance_or_fail, otherwise=None)
        if self._guard.failure is not None:
            self._guard.run(self.settle, otherwise=None)
        if not self._keep_going and self.over:
            raise StopRecording(0)

    def finish(self) -> None:
        """The script has ended: keep what an open window holds."""
        self._guard.run(self._keep_window, otherwise=None)
        self._guard.run(self._end_comparison, otherwise=None)
        if self._timer is not None and not self.timed_ms:
            with suppress(RuntimeError):  # a GPU that died with the script
                self._keep_times(self._timer)
        if self._phase is Phase.WARMUP:
            self.warmup_steps = self._counter.steps
            self.ranks = rank_facts()

    def give_up(self) -> None:
        """A bug of ours has shown: nothing more is recorded, what is kept is kept."""
        self.failure = self._guard.failure
        self._phase = Phase.DONE
        if self.ranks.world_size > 1 or rank_facts().world_size > 1:
            # The script goes on here, so it must go on everywhere, if there is time to say so.
            if not self._last_step.met:
                self._last_step.meet(store_of_group())
            self._last_step.wait(self._counter.steps)

    def settle(self) -> None:
        """Stop the profiler of a recording that was given up; between steps, in its thread."""
        here = threading.get_ident() == self._thread and not in_backward()
        if self._window is not None and here:
            self._drop_window()

    def abandon(self) -> None:
        """The script hangs in another thread: keep the step times, and touch nothing else."""
        if self._timer is not None and not self.timed_ms and self.device == "cpu":
            self.timed_ms = self._timer.milliseconds()
        if self._phase is Phase.WARMUP:
            self.warmup_steps = self._counter.steps

    def _keep_window(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        try:
            window.stop()
            # Half a step with stacks could name some call sites and not others.
            if window.begun and self.trace is None:
                self._save(window)
        except OSError as error:
            self._fail(error)

    def _advance_or_fail(self) -> None:
        try:
            self._advance()
        except OSError as error:  # a disk that is full, a folder that has gone
            self._fail(error)

    def _advance(self) -> None:
        if self._phase is Phase.WARMUP:
            self._after_warmup_step()
        elif self._phase is Phase.TIMING and self._timer is not None:
            self._timer.mark()
            if self._timer.steps >= self._plan.timing:
                self._keep_times(self._timer)
                if self._plan.steps:
                    self._open(lead=self._plan.lead)
                else:
                    self._phase = Phase.DONE
        elif self._phase is Phase.WAITING:
            self._open(lead=self._plan.lead)
        elif self._phase is Phase.COUNTING:
            self._counter.freeze()  # now, as where a window has begun
        elif self._phase is Phase.COMPARING:
            self._end_comparison()
        elif self._window is not None:
            with self.others.ours():
                self._window.step()
            if self._window.begun:
                self._counter.freeze()
            if self._window.full:
                self._close()
        self._report()

    def _after_warmup_step(self) -> None:
        made, plan = self._counter.steps, self._plan
        if made >= plan.warmup:
            self._settle_device()
            self.warmup_steps = made
            self._on_kept()  # little, but who is killed while steps are timed has left a word
            if plan.timing:
                if self._memory is not None:
                    self._memory.begin(self.device)
                self._timer = StepTimer(self.device)
                self._phase = Phase.TIMING
            else:
                self._open(lead=0)
        elif plan.timing == 0 and made == plan.warmup - 1:
            self._settle_device()
            self.warmup_steps = plan.warmup
            self._open(lead=1)

    def _keep_times(self, timer: StepTimer) -> None:
        self.timed_ms = timer.milliseconds()
        if self._memory is not None:
            self._memory.end()
        self._on_kept()

    def _settle_device(self) -> None:
        # Asked only now, and only whether the script itself has started CUDA: to start it here
        # would break a script that forks later, and would record a GPU that nobody uses.
        self.ranks = rank_facts()  # now, because the script may leave its group before it ends
        self.store = store_of_group()
        self._last_step.meet(self.store)
        mark_folder(self._folder, self.store, self.ranks.rank)
        self._choose()
        wanted = self._wanted_device
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.device = "cuda" if used and wanted != "cpu" else "cpu"
        if wanted == "cuda" and not used:
            self._warn("The script did not use a GPU in its warm-up steps; the CPU was recorded.")

    def _choose(self) -> None:
        recording = chosen(self._recording_ranks, self.ranks.world_size)
        if not recording:
            self._warn(
                f"--ranks {self._recording_ranks} names none of the {self.ranks.world_size} ranks "
                "of this run; the first and the last were recorded."
            )
            recording = chosen(DEFAULT, self.ranks.world_size)
        self.chosen = self.ranks.world_size == 1 or self.ranks.rank in recording
        if self.ranks.rank != 0:
            self._progress = Progress(wanted=False)

    def _open(self, *, lead: int) -> None:
        if not self.chosen:
            self._phase = Phase.COUNTING
            if not lead:
                self._counter.freeze()
            return
        if self.others.running():
            self._wait_for_other_profiler()
            return
        if open_ranges := still_open():
            self._do_without(open_ranges)
            return
        stacks = self.trace is not None
        if stacks and (why := _no_stacks()):
            self._warn(f"The step with Python stacks was left out: {why}.")
            self._begin_comparison()
            return
        last = 1 + (self._comparison is not None)
        self._last_step.settle(
            self._counter.steps, last + (0 if stacks else lead + self._plan.steps)
        )
        if not lead:
            self._counter.freeze()
        self._begin_annotating()
        window = ProfilerWindow(
            lead=0 if stacks else lead,
            steps=1 if stacks else self._plan.steps,
            device=self.device,
            stacks=stacks,
        )
        with self.others.ours():
            window.start()
        self._window = window
        self._phase = Phase.STACKS if stacks else Phase.TRACE

    def _close(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        self._save(window)
        if self.stacks is None:
            self._open(lead=0)
        else:
            self._begin_comparison()

    def _begin_comparison(self) -> None:
        """All that a profiler records is there: one more step, compared."""
        self._phase = Phase.DONE
        if self._comparison is None:
            return
        if compiled_something():
            self.fidelity = Fidelity(untold=_COMPILED)
            return
        self._comparison.compare()
        self._phase = Phase.COMPARING

    def _end_comparison(self) -> None:
        if self._phase is Phase.COMPARING and self._comparison is not None:
            self._phase = Phase.DONE
            self.fidelity = self._comparison.compared()
            self._on_kept()

    def _save(self, window: ProfilerWindow) -> None:
        rank = self.ranks.rank
        if self.trace is None:
            self._progress.show("writing the trace")
            name = f"trace-rank{rank}.json.gz"
            window.export(self._folder / name)
            self.trace, self.profiled = name, window.completed
            self._on_kept()
        else:
            self._progress.show("writing the stacks")
            name = f"stacks-rank{rank}.json.gz"
            window.export(self._folder / name)
            self.stacks = name

    def _give_way(self) -> None:
        # Of another thread's profiler torch runs two, and ours cannot be ended from there.
        if self._window is None or threading.get_ident() != self._thread:
            return
        self._drop_window()
        self._wait_for_other_profiler()

    def _drop_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.stop()

    def _fail(self, error: Exception) -> None:
        self.failure = f"Recording was given up: {type(error).__name__}: {error}"
        self._phase = Phase.DONE
        self._drop_window()

    def _wait_for_other_profiler(self) -> None:
        alone = self.ranks.world_size == 1
        # The other ranks stop at the end: there is nothing to wait for when it is too near.
        can_wait = alone or self._last_step.wait(self._counter.steps)
        self._phase = Phase.WAITING if can_wait else Phase.DONE
        self._warn(
            "The script runs a torch profiler of its own, and torch runs one at a time: recording "
            "waited for it to end. For a complete recording, run the script without its profiler."
        )

    def _do_without(self, open_ranges: Sequence[str]) -> None:
        """No profiler may start any more in this process."""
        self._phase = Phase.DONE
        names = ", ".join(open_ranges[:3])
        why = (
            f"a profiler of torch ended while ranges were open ({names}), and another one could "
            "make torch crash when they close"
        )
        if self.trace is None:
            self.failure = f"Nothing was recorded: {why}. Run the script without its profiler."
        else:
            self._warn(f"The step with Python stacks was left out: {why}.")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _report(self) -> None:
        plan = self._plan
        if self._phase is Phase.WARMUP:
            self._progress.show(f"{_steps(plan.warmup)} to warm up")
        elif self._phase is Phase.TIMING and self._timer is not None:
            self._progress.show(f"timing {_steps(plan.timing)}")
        elif self._phase is Phase.TRACE and self._window is not None:
            self._progress.show(f"profiling {_steps(plan.steps)}")
        elif self._phase is Phase.STACKS:
            self._progress.show("profiling one step with stacks")
        elif self._phase is Phase.COMPARING:
            self._progress.show("comparing recomputes with their forward")
        elif self._phase is Phase.WAITING:
            self._progress.show("waiting for the script's own profiler to end")
        elif self._phase is Phase.COUNTING:
            self._progress.show(f"other ranks record {_steps(plan.wanted)}")


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"


def _no_stacks() -> str | None:
    """Why no profiler with Python stacks may run; ``None`` where it may."""
    if stacks_crash():
        return (
            f"on Python 3.13 torch {torch.__version__} crashes when it records them; torch 2.7.1 "
            "does not"
        )
    if sys.getprofile() is not None or threading.getprofile() is not None:
        return (
            "the script has a profile function of its own (sys.setprofile, cProfile), which torch "
            "would take out"
        )
    if getattr(torch._C, "_len_torch_function_stack", lambda: 0)():
        return "the script has a TorchFunctionMode on, which would see torch look at gradients"
    return None
