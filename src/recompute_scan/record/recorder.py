"""The phases of a recording: warm-up, timed steps, profiled steps, compared steps.

They are driven by step boundaries. Of the profiled steps the first are without Python stacks, then
comes one with them, for the call sites only. A profiler's window is written as soon as
it closes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Literal, cast

import torch
from msgspec import Struct, field

from recompute_scan.events import PhaseName, TrainingEvents
from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.record.execute import StopRecording, as_before
from recompute_scan.record.isolation import Guard
from recompute_scan.record.launch import Membership, RankFacts
from recompute_scan.record.measure import Gauges
from recompute_scan.record.profiler import (
    CompiledGraphs,
    OtherProfilers,
    ProfilerWindow,
    Progress,
    no_profiler,
    no_stacks,
    without_own_warnings,
)
from recompute_scan.record.region_ranges import FirstWord
from recompute_scan.record.steps import (
    DEFAULT,
    LONG_S,
    Plan,
    Seen,
    StepCounter,
    StepTimer,
    in_backward,
    settling,
    wait_for_gpus,
)
from recompute_scan.record.torch_versions import compiled_something
from recompute_scan.result.fidelity import Fidelity, Policies
from recompute_scan.result.run_record import Counted
from recompute_scan.result.watched_step import WatchedStep
from recompute_scan.units import plural
from recompute_scan.work import StepWatch, watched_step


class Phase(Enum):
    """The purpose of the steps that pass now."""

    WARMUP = auto()
    TIMING = auto()
    WAITING = auto()  # for a profiler of the script's own to end
    TRACE = auto()
    STACKS = auto()
    COMPARING = auto()
    WATCHING = auto()
    COUNTING = auto()  # on a rank that is not to record
    DONE = auto()

    @property
    def event(self) -> PhaseName:
        return cast("PhaseName", self.name.lower())

    def described(self, plan: Plan) -> str | None:
        """The phase in a few words; ``None`` when nothing is recorded any more."""
        most = "up to " if plan.fewest is not None else ""
        return {
            Phase.WARMUP: f"{plural(plan.warmup, 'step')} to warm up",
            Phase.TIMING: f"timing {most}{plural(plan.timing, 'step')}",
            Phase.WAITING: "waiting for the script's own profiler to end",
            Phase.TRACE: f"profiling {plural(plan.steps, 'step')}",
            Phase.STACKS: "profiling one step with stacks",
            Phase.COMPARING: "comparing recomputes with their forward",
            Phase.WATCHING: "watching two steps for unused work",
            Phase.COUNTING: f"other ranks record {plural(plan.wanted, 'step')}",
        }.get(self)


class RecordedSoFar(Struct):
    """The recording so far; the fields are as in the run record.

    Attributes:
        folder: Where the traces go.
        phase: The purpose of the steps that pass now.
        device: Known once the warm-up is over.
        failure: Why recording had to be given up.
    """

    folder: Path
    phase: Phase = Phase.WARMUP
    device: Literal["cpu", "cuda"] = "cpu"
    warmup_steps: int = 0
    timed_ms: tuple[float, ...] = ()
    trace: str | None = None
    stacks: str | None = None
    profiled: int = 0
    fidelity: Fidelity | None = None
    policies: Policies | None = None
    counted: Counted | None = None
    watched: WatchedStep | None = None
    warnings: list[str] = field(default_factory=list)
    failure: str | None = None

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


_OTHER_PROFILER = (
    "The script runs a torch profiler itself, and torch runs one at a time: recording "
    "waited for it to end. If steps are missing, run the script without its profiler."
)


_COMPILED = Fidelity(
    untold="Part of the step is compiled, and compiled code runs no operators that could be "
    "compared."
)
_NOT_WATCHED = "Work that is done for nothing was not looked for"
_COMPILED_WORK = WatchedStep(
    untold="Part of the step is compiled, and operators of compiled code cannot be watched."
)


class Recorder:
    """Records one rank of a run.

    Args:
        recording_ranks: The ranks to record, as :func:`recompute_scan.record.steps.chosen` reads
            them.
        on_kept: Called when more has been recorded.
        reports: Whether the progress goes to a log too, with the first count of recomputes.
        quiet: Print no progress.

    Attributes:
        plan: The steps of each phase.
        kept: The recording so far.
        counter: Counts the steps.
        probe: Annotates checkpoint calls, and compares and counts their runs.
        graphs: Takes the compiler's graphs.
        membership: This process among the other ranks.
        others: Notices profilers of the script.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        guard: Guard,
        *,
        device: Literal["auto", "cpu", "cuda"],
        keep_going: bool,
        recording_ranks: str = DEFAULT,
        gauges: Gauges | None = None,
        on_kept: Callable[[], None] = lambda: None,
        events: TrainingEvents | None = None,
        reports: bool = False,
        quiet: bool = False,
    ) -> None:
        self._events = events or TrainingEvents("")
        self._guard = guard
        guard.on_failure, guard.settle = self.give_up, self.settle
        self.counter = StepCounter()
        self.probe = Probe(Path.cwd(), guard)
        self.graphs = CompiledGraphs(folder, lambda: self.ranks.rank, guard)
        self._comparison = self.probe.comparison
        self._first_word = FirstWord(self._comparison, plan, self._say) if reports else None
        self._watch: StepWatch | None = None
        self._thread = threading.get_ident()
        self.plan = plan
        self._wanted_device = device
        self._keep_going = keep_going
        self._gauges = gauges
        self._on_kept = on_kept
        self.membership = Membership(plan, recording_ranks)
        self._logs = reports
        self._progress = Progress(wanted=self.ranks.rank == 0, logs=reports, quiet=quiet)
        self.kept = RecordedSoFar(folder)
        self._timer: StepTimer | None = None
        self._began, self._began_at = monotonic(), 0
        self._window: ProfilerWindow | None = None
        self._waited, self._held = False, 0
        self.others = OtherProfilers(self._give_way, guard)

    @property
    def ranks(self) -> RankFacts:
        """This process among the others, as last known."""
        return self.membership.ranks

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
        """Whether the script may stop. One of several ranks stops when the others do, also where
        its recording has failed.
        """
        if self.membership.alone:
            return self.done and self._guard.failure is None
        return self.membership.last_step.passed(self.counter.steps)

    @property
    def bug(self) -> str | None:
        """The bug of ours that ended the recording, in one sentence."""
        return self._guard.failure if self._guard.is_bug else None

    @property
    def seen(self) -> Seen:
        return Seen(
            made=self.counter.steps,
            profiled=self.kept.profiled,
            # Or none are wanted any more: a warning says why.
            stacks=self.kept.stacks is not None or self.kept.phase is Phase.DONE,
            explicit=self.counter.explicit,
            waited=self._waited,
            held=self._held,
        )

    def restart(self) -> None:
        """Steps were counted wrongly until now: warm up again, drop what was timed."""
        if self.kept.phase is Phase.DONE:
            return
        if self.kept.trace is not None:
            self.kept.warn(
                "recompute_scan.step() was first called after the trace was recorded: the traced "
                "steps are optimizer steps."
            )
            return
        self._drop_window()
        self._timer = None
        self.kept.timed_ms, self.kept.warmup_steps = (), 0
        self.kept.phase = Phase.WARMUP

    def boundary(self) -> None:
        """A step has ended.

        Raises:
            StopRecording: Everything is recorded and the script need not go on.
        """
        if self.kept.phase is not Phase.DONE:
            with without_own_warnings():
                self._guard.run(partial(self._or_fail, self._advance), otherwise=None)
        if self._guard.failure is not None:
            self._guard.run(self.settle, otherwise=None)
        if not self._keep_going and self.over:
            if self._logs and self.ranks.rank == 0:
                self._logs = False
                self._progress.say(
                    f"stopped the script after its step {self.counter.steps} "
                    "(--keep-going lets it run on)"
                )
            raise StopRecording(0)

    @as_before()
    def finish(self) -> None:
        with without_own_warnings():
            self._guard.run(partial(self._or_fail, self._keep_window), otherwise=None)
            self._guard.run(self._end_comparison, otherwise=None)
            self._guard.run(self._end_watching, otherwise=None)
        if self._has_times:
            with suppress(RuntimeError):  # a GPU that died with the script
                self._keep_times()
        if self.kept.phase is Phase.WARMUP:
            self.kept.warmup_steps = self.counter.steps
            self.membership.look()

    def give_up(self) -> None:
        """A bug of ours has shown, or the GPU has failed: what is kept is kept, and no more is."""
        self.kept.failure = self._guard.failure
        self.kept.phase = Phase.DONE
        if self._watch is not None:
            self._watch.on = False  # what it has put into the process goes between two steps
        self.membership.go_on(self.counter.steps)

    def forget(self) -> None:
        """In a forked process: look at nothing, and let its operators through."""
        if self._watch is not None:
            self._watch.end()

    def settle(self) -> None:
        """Stop the profiler of a recording that was given up; between steps, in its thread."""
        if threading.get_ident() == self._thread and not in_backward():
            with without_own_warnings():
                self._drop_window()
            if self._watch is not None:
                self._watch.end()

    def abandon(self) -> None:
        """The script hangs in another thread: keep the step times, and touch nothing else."""
        if self._has_times and self.kept.device == "cpu":
            self._keep_times()
        if self.kept.phase is Phase.WARMUP:
            self.kept.warmup_steps = self.counter.steps

    def _or_fail(self, goes_on: Callable[[], object]) -> None:
        try:
            goes_on()
        except OSError as error:  # a disk that is full, a folder that has gone
            self.kept.failure = f"Recording was given up: {type(error).__name__}: {error}"
            self.kept.phase = Phase.DONE
            made = self.counter.steps
            self.membership.last_step.settle(made, self.plan.wanted - made)
            self._drop_window()

    def _advance(self) -> None:
        if self.kept.phase is Phase.TIMING and self._timer is not None:
            self._timer.mark()
            if not self.membership.is_timed(self.counter.steps, self._timer):
                self._report()
                return
        with as_before():
            self._go_on()

    def _go_on(self) -> None:
        if self.kept.phase is Phase.WARMUP:
            self._after_warmup_step()
        elif self.kept.phase is Phase.TIMING and self._timer is not None:
            self._keep_times()
            if self.plan.steps:
                self._open_window(lead=self.plan.lead)
            else:
                self.kept.phase = Phase.DONE
        elif self.kept.phase is Phase.WAITING:
            self._open_window(lead=self.plan.lead)
        elif self.kept.phase is Phase.COUNTING:
            self.counter.freeze()  # now, as where a window has begun
        elif self.kept.phase is Phase.COMPARING:
            self._end_comparison()
        elif self.kept.phase is Phase.WATCHING:
            if self._watch is not None and self._watch.next_step():
                self._end_watching()
        else:
            self._step_window()
        if self.kept.phase is Phase.DONE:
            self._begin_comparison()
        if self.kept.phase is Phase.DONE:
            self._begin_watching()
        self._report()

    def _open_window(self, *, lead: int) -> None:
        """Begin the next window, or the phase in its place where it cannot begin.

        Args:
            lead: Steps that warm the profiler up.
        """
        kept, plan, membership = self.kept, self.plan, self.membership
        stacks = kept.trace is not None
        foreign = membership.chosen and self.others.running()
        if not foreign:
            needed = (0 if stacks else lead + plan.steps) + plan.behind_profiled
            membership.last_step.settle(self.counter.steps, needed)
        if not membership.chosen:
            kept.phase = Phase.COUNTING
            if not lead:
                self.counter.freeze()
            return
        if foreign:
            self._wait_for_other_profiler()
            return
        if why := no_profiler() or (no_stacks() if stacks else None):
            self._do_without(why)
            return
        if not lead:
            self.counter.freeze()
        self.probe.begin()
        window = ProfilerWindow(
            lead=0 if stacks else lead,
            steps=1 if stacks else plan.steps,
            device=kept.device,
            stacks=stacks,
        )
        with self.others.ours():
            window.start()
        self._window = window
        kept.phase = Phase.STACKS if stacks else Phase.TRACE
        if stacks:
            self.probe.policies.begin()

    def _step_window(self) -> None:
        """A step has ended while a window is open."""
        window = self._window
        if window is None:
            return
        with self.others.ours():
            window.step()
        if window.begun:
            self.counter.freeze()
        if not window.full:
            return
        self.kept.policies = self.probe.policies.end() or self.kept.policies
        self._window = None
        if not window.holds_trace:
            self._do_without("another profiler has taken its place")
            return
        self._save(window)
        if self.plan.stacks and self.kept.stacks is None:
            self._open_window(lead=0)
        else:
            self.kept.phase = Phase.DONE

    def _keep_window(self) -> None:
        window = self._drop_window()
        # Half a step with stacks could name some call sites and not others.
        if window is not None and window.holds_trace and self.kept.trace is None:
            self._save(window)

    def _drop_window(self) -> ProfilerWindow | None:
        """The window that was open, which is stopped without being written."""
        self.probe.policies.end()
        window, self._window = self._window, None
        if window is not None:
            window.stop()
        return window

    def _save(self, window: ProfilerWindow) -> None:
        """Write the trace, or, once that is written, the one with stacks."""
        kept, stacks = self.kept, self.kept.trace is not None
        name = f"{'stacks' if stacks else 'trace'}-rank{self.ranks.rank}.json.gz"
        self._progress.show("writing the stacks" if stacks else "writing the trace")
        window.export(kept.folder / name)
        if stacks:
            kept.stacks = name
        else:
            kept.trace, kept.profiled = name, window.completed
            self._on_kept()

    def _give_way(self) -> None:
        # Of another thread's profiler torch runs two, and ours cannot be ended from there.
        if self._window is not None and threading.get_ident() == self._thread:
            self._drop_window()
            if self._guard.failure is None:
                self._wait_for_other_profiler()

    def _wait_for_other_profiler(self) -> None:
        # The other ranks stop at the end: there is nothing to wait for when it is too near.
        membership = self.membership
        can_wait = membership.alone or membership.last_step.wait(self.counter.steps)
        self.kept.phase = Phase.WAITING if can_wait else Phase.DONE
        self._waited = True
        self.kept.warn(_OTHER_PROFILER)

    def _do_without(self, why: str) -> None:
        """No profiler of the kind that comes next may start in this process."""
        self.kept.phase = Phase.DONE
        if self.kept.trace is None:
            self.kept.failure = f"Nothing was recorded: {why}. Run the script without its profiler."
        else:
            self.kept.warn(f"The step with Python stacks was left out: {why}.")

    def _begin_comparison(self) -> None:
        """All that a profiler records is there: one more step is compared, once."""
        kept = self.kept
        if not self.plan.fidelity or kept.fidelity is not None:
            return
        if kept.trace is None and (not self.plan.only_compares or kept.failure is not None):
            return
        if compiled_something():
            kept.fidelity = _COMPILED
        else:
            if kept.device == "cuda":
                wait_for_gpus()
            self._comparison.compare()
            kept.phase = Phase.COMPARING

    def _end_comparison(self) -> None:
        if self.kept.phase is Phase.COMPARING:
            self.kept.phase = Phase.DONE
            if self.kept.device == "cuda":
                wait_for_gpus()
            found = self._comparison.compared()
            # Code that is compiled in that very step hides its operators as well.
            self.kept.fidelity = _COMPILED if compiled_something() else found
            self._on_kept()

    def _begin_watching(self) -> None:
        """Behind all that is profiled and compared: two more steps are watched, once."""
        kept = self.kept
        if not self.plan.watched or kept.trace is None or kept.watched is not None:
            return
        if compiled_something():
            kept.watched = _COMPILED_WORK
            return
        with self._guard.part(_NOT_WATCHED):
            self._watch = self.probe.watch(kept.device == "cuda")
            if self._watch.begin():
                kept.phase = Phase.WATCHING
        if kept.phase is not Phase.WATCHING:
            self._end_watching()

    def _end_watching(self) -> None:
        """Both steps have ended, or the script has."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self.kept.phase = Phase.DONE
            with self._guard.part(_NOT_WATCHED):
                watch.end()
                compiled, timed = compiled_something(), self.kept.timed_ms
                self.kept.watched = _COMPILED_WORK if compiled else watched_step(watch, timed)
            self._on_kept()

    def _after_warmup_step(self) -> None:
        if len(settling):
            self._held += 1
            self._timer, self._began = None, monotonic()
            if self._first_word is not None:
                self._first_word.wait()
            return
        made, plan = self.counter.steps - self._held, self.plan
        took_s = monotonic() - self._began
        is_long = self._timer is not None and took_s > LONG_S
        if self._timer is not None:
            self._timer.mark()
        self.membership.look()
        if self._first_word is not None and not self._first_word.over:
            self.kept.counted = self._first_word.boundary(made, took_s) or self.kept.counted
            self._on_kept()  # little, but who is killed has left a word
        if made >= plan.warmup or is_long:
            self._settle_device()
            self.kept.warmup_steps = self.counter.steps - is_long
            self._on_kept()
            if plan.timing:
                if self._gauges is not None:
                    self._gauges.begin_timing(self.kept.device)
                if not is_long:
                    self._timer = StepTimer(self.kept.device)
                self.kept.phase = Phase.TIMING
            elif plan.only_compares:
                self._compare_alone()
            else:
                self._open_window(lead=0)
        elif plan.steps and plan.timing == 0 and made == plan.warmup - 1:
            self._settle_device()
            self.kept.warmup_steps = plan.warmup + self._held
            self._open_window(lead=1)
        elif plan.fewest is not None:
            # A long step is timed already: it has as much behind it as the first of ten has.
            fits = made == plan.fewest[0]
            self._timer = StepTimer(self.device) if fits else None
        self._began, self._began_at = monotonic(), self.counter.steps

    def _compare_alone(self) -> None:
        """Nothing is timed or profiled: the next step is compared, on the chosen ranks."""
        if not self.membership.chosen:
            self.kept.phase = Phase.COUNTING
            return
        self.membership.last_step.settle(self.counter.steps, 1)
        self.counter.freeze()
        self.probe.begin()
        self.kept.phase = Phase.DONE

    @property
    def _has_times(self) -> bool:
        """Whether steps were timed that are not kept yet; a warm-up's need not be kept."""
        timed = self._timer.steps if self._timer is not None and self.kept.warmup_steps else 0
        return bool(timed) and not self.kept.timed_ms

    def _keep_times(self) -> None:
        self.kept.timed_ms = self._timer.milliseconds() if self._timer else ()
        if self._gauges is not None:
            self._gauges.end_timing()
        self._on_kept()

    def _settle_device(self) -> None:
        # Asked only now, and only whether the script itself has started CUDA: to start it here
        # would break a script that forks later, and would record an unused GPU.
        if warning := self.membership.settle(self.kept.folder, self.counter.steps):
            self.kept.warn(warning)
        if self.ranks.rank != 0:
            self._progress.end()
        self.kept.device = self.device
        if self._wanted_device == "cuda" and self.kept.device == "cpu":
            self.kept.warn(
                "The script did not use a GPU in its warm-up steps; the CPU was recorded."
            )

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device in use now; ``kept.device`` is known once the warm-up is over."""
        used = torch.cuda.is_initialized()
        return "cuda" if used and self._wanted_device != "cpu" else "cpu"

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            self._events.progress(text)
            self._progress.say(text)

    def _report(self) -> None:
        self._events.boundary(self.kept.phase.event, self.counter.steps, self.ranks.rank)
        if self.ranks.rank == 0 and (text := self.kept.phase.described(self.plan)):
            self._progress.show(text, self.counter.steps)
            behind = self.counter.steps - self._began_at
            if self.kept.phase not in (Phase.WARMUP, Phase.WAITING) and behind > 0:
                step_s = (monotonic() - self._began) / behind
                self._progress.remind(*self.plan.at(self.counter.steps - self._held, step_s))
