"""The phases of a recording: warm-up, timed steps, profiled steps, compared steps.

They are driven by step boundaries. Of the profiled steps the first are without Python stacks, then
comes one with them, for the call sites only. What a profiler's window holds is written as soon as
it closes.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import torch
from msgspec import Struct, field

from recompute_scan.events import PhaseName
from recompute_scan.record.execute import StopRecording
from recompute_scan.record.isolation import Guard
from recompute_scan.record.launch import Membership, RankFacts
from recompute_scan.record.measure import PeakMemory
from recompute_scan.record.policies import DecisionWatch
from recompute_scan.record.profiler import (
    OtherProfilers,
    ProfilerWindow,
    Progress,
    still_open,
    without_own_warnings,
)
from recompute_scan.record.region_ranges import ComparedRegions, FirstWord
from recompute_scan.record.steps import (
    DEFAULT,
    LONG_S,
    Plan,
    Seen,
    StepCounter,
    StepTimer,
    in_backward,
    wait_for_gpus,
)
from recompute_scan.record.torch_versions import compiled_something, stacks_crash
from recompute_scan.result.fidelity import Fidelity, Policies
from recompute_scan.result.run_record import Counted
from recompute_scan.units import plural


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

    @property
    def event(self) -> PhaseName:
        """Its name in the event stream."""
        return cast("PhaseName", self.name.lower())

    def described(self, plan: Plan) -> str | None:
        """What goes on in this phase, in a few words; ``None`` when nothing does any more."""
        most = "up to " if plan.fewest is not None else ""
        return {
            Phase.WARMUP: f"{plural(plan.warmup, 'step')} to warm up",
            Phase.TIMING: f"timing {most}{plural(plan.timing, 'step')}",
            Phase.WAITING: "waiting for the script's own profiler to end",
            Phase.TRACE: f"profiling {plural(plan.steps, 'step')}",
            Phase.STACKS: "profiling one step with stacks",
            Phase.COMPARING: "comparing recomputes with their forward",
            Phase.COUNTING: f"other ranks record {plural(plan.wanted, 'step')}",
        }.get(self)


class RecordedSoFar(Struct):
    """What has been recorded so far.

    Attributes:
        folder: Where the traces go.
        phase: What the steps that pass now are for.
        device: ``cpu`` or ``cuda``, known once the warm-up is over.
        warmup_steps: Steps before the first timed or profiled one.
        timed_ms: Durations of the timed steps.
        trace: File name of the trace, once written.
        stacks: File name of the trace with stacks, once written.
        profiled: Complete steps in the trace.
        fidelity: What comparing a step has shown, once it was.
        policies: What policies of selective checkpoints decided in a step, once it was seen.
        counted: How often checkpointed blocks ran in the last step in which they were counted.
        warnings: What the person should know.
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
    warnings: list[str] = field(default_factory=list)
    failure: str | None = None

    def save_trace(self, window: ProfilerWindow, rank: int) -> None:
        """Write what a window without stacks holds."""
        name = f"trace-rank{rank}.json.gz"
        window.export(self.folder / name)
        self.trace, self.profiled = name, window.completed

    def save_stacks(self, window: ProfilerWindow, rank: int) -> None:
        """Write what the window with stacks holds."""
        name = f"stacks-rank{rank}.json.gz"
        window.export(self.folder / name)
        self.stacks = name

    def warn(self, text: str) -> None:
        """Say something to the person, once."""
        if text not in self.warnings:
            self.warnings.append(text)


_OTHER_PROFILER = (
    "The script runs a torch profiler of its own, and torch runs one at a time: recording "
    "waited for it to end. For a complete recording, run the script without its profiler."
)


class Tracing:
    """Opens and closes the windows of one rank.

    Attributes:
        others: Sees profilers of the script's own.
        waited: Whether one of these stood in the way.
    """

    def __init__(
        self,
        plan: Plan,
        kept: RecordedSoFar,
        membership: Membership,
        *,
        counter: StepCounter,
        progress: Progress,
        begin_annotating: Callable[[], None],
        on_kept: Callable[[], None],
        guard: Guard,
        policies: DecisionWatch | None = None,
    ) -> None:
        self._policies = policies
        self._thread = threading.get_ident()
        self._plan = plan
        self._kept = kept
        self._membership = membership
        self._counter = counter
        self._progress = progress
        self._begin_annotating = begin_annotating
        self._on_kept = on_kept
        self._window: ProfilerWindow | None = None
        self.waited = False
        self.others = OtherProfilers(self._give_way, guard)

    def open(self, *, lead: int) -> None:
        """Begin the next window, or the phase in its place where it cannot begin.

        Args:
            lead: Steps that warm the profiler up.
        """
        stacks = self._kept.trace is not None
        foreign = self._membership.chosen and self.others.running()
        if not foreign:
            needed = (0 if stacks else lead + self._plan.steps) + self._plan.stacks
            needed += self._plan.fidelity
            self._membership.last_step.settle(self._counter.steps, needed)
        if not self._membership.chosen:
            self._kept.phase = Phase.COUNTING
            if not lead:
                self._counter.freeze()
            return
        if foreign:
            self._wait_for_other_profiler()
            return
        if why := _no_profiler():
            self._do_without(why)
            return
        if stacks and (why := _no_stacks()):
            self._do_without(why)
            return
        if not lead:
            self._counter.freeze()
        self._begin_annotating()
        window = ProfilerWindow(
            lead=0 if stacks else lead,
            steps=1 if stacks else self._plan.steps,
            device=self._kept.device,
            stacks=stacks,
        )
        with self.others.ours():
            window.start()
        self._window = window
        self._kept.phase = Phase.STACKS if stacks else Phase.TRACE
        if stacks and self._policies is not None:
            self._policies.begin()

    def step(self) -> None:
        """A step has ended while a window is open."""
        if self._window is None:
            return
        with self.others.ours():
            self._window.step()
        if self._window.begun:
            self._counter.freeze()
        if self._window.full:
            self._close()

    def keep(self) -> None:
        """The script has ended: keep what an open window holds."""
        self._see_decided()
        window, self._window = self._window, None
        if window is None:
            return
        window.stop()
        # Half a step with stacks could name some call sites and not others.
        if window.begun and self._kept.trace is None:
            self._save(window)

    def drop(self) -> None:
        """Stop an open window, and keep nothing of it."""
        self._see_decided()
        window, self._window = self._window, None
        if window is not None:
            window.stop()

    def _see_decided(self) -> Policies | None:
        return self._policies.end() if self._policies is not None else None

    def _close(self) -> None:
        decided = self._see_decided()
        if decided is not None:
            self._kept.policies = decided
        window, self._window = self._window, None
        if window is None:
            return
        self._save(window)
        if self._plan.stacks and self._kept.stacks is None:
            self.open(lead=0)
        else:
            self._kept.phase = Phase.DONE

    def _save(self, window: ProfilerWindow) -> None:
        if self._kept.trace is None:
            self._progress.show("writing the trace")
            self._kept.save_trace(window, self._membership.ranks.rank)
            self._on_kept()
        else:
            self._progress.show("writing the stacks")
            self._kept.save_stacks(window, self._membership.ranks.rank)

    def _give_way(self) -> None:
        # Of another thread's profiler torch runs two, and ours cannot be ended from there.
        if self._window is None or threading.get_ident() != self._thread:
            return
        self.drop()
        self._wait_for_other_profiler()

    def _wait_for_other_profiler(self) -> None:
        membership = self._membership
        # The other ranks stop at the end: there is nothing to wait for when it is too near.
        can_wait = membership.alone or membership.last_step.wait(self._counter.steps)
        self._kept.phase = Phase.WAITING if can_wait else Phase.DONE
        self.waited = True
        self._kept.warn(_OTHER_PROFILER)

    def _do_without(self, why: str) -> None:
        """No profiler of the kind that comes next may start in this process."""
        self._kept.phase = Phase.DONE
        if self._kept.trace is None:
            self._kept.failure = (
                f"Nothing was recorded: {why}. Run the script without its profiler."
            )
        else:
            self._kept.warn(f"The step with Python stacks was left out: {why}.")


def _no_profiler() -> str | None:
    """Why no profiler may start any more in this process; ``None`` where one may."""
    open_ranges = still_open()
    if not open_ranges:
        return None
    names = ", ".join(open_ranges[:3])
    return (
        f"a profiler of torch ended while ranges were open ({names}), and another one could "
        "make torch crash when they close"
    )


def _no_stacks() -> str | None:
    """Why no profiler with Python stacks may run; ``None`` where it may."""
    if stacks_crash():
        return (
            f"on Python 3.13 torch {torch.__version__} crashes when it records them; torch 2.7.1 "
            "does not"
        )
    if not all(map(_is_text, _files())):
        return "the path of a file of the script is no UTF-8, and torch ends the process over it"
    if sys.getprofile() is not None or threading.getprofile() is not None:
        return (
            "the script has a profile function of its own (sys.setprofile, cProfile), which torch "
            "would take out"
        )
    if getattr(torch._C, "_len_torch_function_stack", lambda: 0)():
        return "the script has a TorchFunctionMode on, which would see torch look at gradients"
    return None


def _files() -> Iterator[str]:
    """Paths of the code that runs, and of the modules from which more may."""
    for frame in sys._current_frames().values():
        yield from (one.f_code.co_filename for one, _ in traceback.walk_stack(frame))
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str):
            yield file


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


_COMPILED = Fidelity(
    untold="Part of the step is compiled, and compiled code runs no operators that could be "
    "compared."
)


def _hidden() -> Fidelity | None:
    """Why nothing can be compared, where something is compiled."""
    return _COMPILED if compiled_something() else None


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
        comparison: ComparedRegions | None = None,
        policies: DecisionWatch | None = None,
        memory: PeakMemory | None = None,
        recording_ranks: str = DEFAULT,
        on_kept: Callable[[], None] = lambda: None,
        guard: Guard | None = None,
        follow: Callable[[Phase, int, int], None] = lambda *_: None,
        counting: ComparedRegions | None = None,
        tell: Callable[[str], None] = lambda _: None,
        logs: bool = False,
    ) -> None:
        self._follow = follow
        self._tell = tell
        self._first_word = FirstWord(counting, plan, self._say) if counting else None
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
        self._logs = logs
        self._progress = Progress(wanted=self.ranks.rank == 0, logs=logs)
        self.kept = RecordedSoFar(folder)
        self._timer: StepTimer | None = None
        self._began = time.monotonic()
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
        return self._guard.failure if self._guard.is_bug else None

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
        self.kept.timed_ms, self.kept.warmup_steps = (), 0
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
            if self._logs and self.ranks.rank == 0:
                self._logs = False
                self._progress.say(
                    f"stopped the script after step {self._counter.steps} of its own "
                    "(--keep-going goes on)"
                )
            raise StopRecording(0)

    def finish(self) -> None:
        """The script has ended: keep what an open window holds."""
        with without_own_warnings():
            self._guard.run(self._keep_window_or_fail, otherwise=None)
            self._guard.run(self._end_comparison, otherwise=None)
        if self._has_times:
            with suppress(RuntimeError):  # a GPU that died with the script
                self._keep_times()
        if self.kept.phase is Phase.WARMUP:
            self.kept.warmup_steps = self._counter.steps
            self._membership.look()

    def give_up(self) -> None:
        """A bug of ours has shown, or the GPU has failed: what is kept is kept, and no more is."""
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
        if self._has_times and self.kept.device == "cpu":
            self._keep_times()
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
            if self._membership.is_timed(self._counter.steps, self._timer):
                self._keep_times()
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
            self._wait()
            self._comparison.compare()
            kept.phase = Phase.COMPARING

    def _end_comparison(self) -> None:
        if self.kept.phase is Phase.COMPARING and self._comparison is not None:
            self.kept.phase = Phase.DONE
            self._wait()
            found = self._comparison.compared()
            # What is compiled in that very step hides its operators as well.
            self.kept.fidelity = _hidden() or found
            self._on_kept()

    def _wait(self) -> None:
        """The compared step takes from an idle GPU to an idle GPU."""
        if self.kept.device == "cuda":
            wait_for_gpus()

    def _after_warmup_step(self) -> None:
        made, plan = self._counter.steps, self._plan
        took_s = time.monotonic() - self._began
        is_long = self._timer is not None and took_s > LONG_S
        if self._timer is not None:
            self._timer.mark()
        self._membership.look()
        if self._first_word is not None and not self._first_word.over:
            self.kept.counted = self._first_word.boundary(made, took_s) or self.kept.counted
            self._on_kept()  # little, but who is killed has left a word
        if made >= plan.warmup or is_long:
            self._settle_device()
            self.kept.warmup_steps = made - is_long
            self._on_kept()
            if plan.timing:
                if self._memory is not None:
                    self._memory.begin(self.kept.device)
                if not is_long:
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
        elif plan.fewest is not None:
            # A long step is timed already: it has as much behind it as the first of ten has.
            fits = made == plan.fewest[0]
            self._timer = StepTimer(self._used_device()) if fits else None
        self._began = time.monotonic()

    def _compare_alone(self) -> None:
        """Nothing is timed or profiled: the next step is compared, on the chosen ranks."""
        if not self._membership.chosen:
            self.kept.phase = Phase.COUNTING
            return
        self._membership.last_step.settle(self._counter.steps, 1)
        self._counter.freeze()
        self._begin_annotating()
        self.kept.phase = Phase.DONE

    @property
    def _has_times(self) -> bool:
        """Whether steps were timed that are not kept yet; what is timed in a warm-up may not be."""
        timed = self._timer.steps if self._timer is not None and self.kept.warmup_steps else 0
        return bool(timed) and not self.kept.timed_ms

    def _keep_times(self) -> None:
        self.kept.timed_ms = self._timer.milliseconds() if self._timer else ()
        if self._memory is not None:
            self._memory.end()
        self._on_kept()

    def _settle_device(self) -> None:
        # Asked only now, and only whether the script itself has started CUDA: to start it here
        # would break a script that forks later, and would record a GPU that nobody uses.
        if warning := self._membership.settle(self.kept.folder, self._counter.steps):
            self.kept.warn(warning)
        if self.ranks.rank != 0:
            self._progress.end()
        self.kept.device = self._used_device()
        if self._wanted_device == "cuda" and self.kept.device == "cpu":
            self.kept.warn(
                "The script did not use a GPU in its warm-up steps; the CPU was recorded."
            )

    def _used_device(self) -> Literal["cpu", "cuda"]:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        return "cuda" if used and self._wanted_device != "cpu" else "cpu"

    def _fail(self, error: Exception) -> None:
        self.kept.failure = f"Recording was given up: {type(error).__name__}: {error}"
        self.kept.phase = Phase.DONE
        made = self._counter.steps
        self._membership.last_step.settle(made, self._plan.wanted - made)
        self._tracing.drop()

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            self._tell(text)
            self._progress.say(text)

    def _report(self) -> None:
        self._follow(self.kept.phase, self._counter.steps, self.ranks.rank)
        if self.ranks.rank == 0 and (text := self.kept.phase.described(self._plan)):
            self._progress.show(text, self._counter.steps)
