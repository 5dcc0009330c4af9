"""The profiled steps of a recording: one profiler window after another.

First the steps without Python stacks, then one with them, for the call sites only. What a window
holds is written as soon as it closes.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Protocol

import torch

from recompute_scan.deciding import Policies
from recompute_scan.record.compat import stacks_crash
from recompute_scan.record.guard import Guard
from recompute_scan.record.launch.membership import Membership
from recompute_scan.record.phase import Phase, RecordedSoFar
from recompute_scan.record.profiler import OtherProfilers, ProfilerWindow
from recompute_scan.record.quiet import Progress
from recompute_scan.record.ranges import still_open
from recompute_scan.record.scope import Plan
from recompute_scan.record.steps import StepCounter

_OTHER_PROFILER = (
    "The script runs a torch profiler of its own, and torch runs one at a time: recording "
    "waited for it to end. For a complete recording, run the script without its profiler."
)


class DecidingStep(Protocol):
    """What sees policies decide in a step."""

    def begin(self) -> None:
        """The step begins."""

    def end(self) -> Policies | None:
        """It has ended: what was decided."""


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
        policies: DecidingStep | None = None,
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
        if not self._membership.chosen:
            self._kept.phase = Phase.COUNTING
            if not lead:
                self._counter.freeze()
            return
        if self.others.running():
            self._wait_for_other_profiler()
            return
        if why := _no_profiler():
            self._do_without(why)
            return
        stacks = self._kept.trace is not None
        if stacks and (why := _no_stacks()):
            self._do_without(why)
            return
        needed = (0 if stacks else lead + self._plan.steps) + 1 + self._plan.fidelity
        self._membership.last_step.settle(self._counter.steps, needed)
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
        if self._kept.stacks is None:
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
