"""`record(...)`: a context manager around a training loop.

The same annotations, timed steps and traces as ``run`` makes. The loop says where its steps end;
with the last one that is recorded everything of ours is taken out of the process again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.api import Scan
from recompute_scan.errors import RunError, ScanError, UsageError
from recompute_scan.record.checkpoint_calls import install_self_test
from recompute_scan.record.execute import as_before
from recompute_scan.record.isolation import Guard
from recompute_scan.record.launch import wait_for_ranks
from recompute_scan.record.options import (
    beside,
    cannot_write,
    check_device,
    check_plan,
    make_run_record,
    prepare,
    take_place,
    write_report,
)
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.steps import (
    EXPLICIT,
    Plan,
    StepHooks,
    Wording,
    is_capturing,
    is_recorded,
)
from recompute_scan.record.watchdog import end_of
from recompute_scan.result.run_record import RunInfo, write_run_info

# How long rank 0 waits for the run records of the others, which end with the same step.
_RANKS_TIMEOUT_S = 30.0
_POLL_S = 0.1


class Home:
    """The folder of a recording; a temporary one is deleted with the last scan that uses it."""

    def __init__(self, folder: Path | None) -> None:
        self.lasting = folder is not None
        self._earlier: Path | None = None
        self._root = Path.cwd()
        if folder is None:
            self.path = Path(tempfile.mkdtemp(prefix="recompute-scan-"))
        else:  # absolute, because the loop may change the current directory
            self.path, self._earlier = beside(folder.absolute())
        if not self.lasting:
            weakref.finalize(self, _delete, self.path, os.getpid())

    def scan(self, info: RunInfo) -> Scan:
        """The scan of the recorded steps, once this rank's run record is written.

        Raises:
            RunError: There is no trace (``E309``); the second line says why.
        """
        if self._earlier is not None and info.rank:
            self._follow_rank_0(self._earlier)
        elif self.lasting and info.world_size > 1:
            wait_for_ranks(self.path, info.world_size, _RANKS_TIMEOUT_S)
        elif info.trace is None and info.end is None:
            why = " ".join(filter(None, (info.message, *info.warnings)))
            if not info.chosen:
                why = f"of {info.world_size} ranks, rank {info.rank} was not one to be recorded"
            raise RunError("E309", "The recording gave no trace.", why=why)
        result = analyse([self.path])
        if self.lasting and info.rank == 0:
            write_report(self.path, result, root=self._root, place=self._earlier or self.path)
            if self._earlier is not None and info.exit_status == 0:
                take_place(self.path, self._earlier)
                self.path, self._earlier = self._earlier, None
        return Scan(result, (str(self.path),), keeps=self)

    def _follow_rank_0(self, earlier: Path) -> None:
        """Wait until it has put what was recorded in the place of an earlier result."""
        deadline = monotonic() + _RANKS_TIMEOUT_S
        while self.path.exists() and monotonic() < deadline:
            sleep(_POLL_S)
        if not self.path.exists():
            self.path = earlier


def _delete(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child, which has it too
        shutil.rmtree(folder, ignore_errors=True)


_INTERRUPTED = 130
_WORDING = Wording(
    who="The loop",
    no_step="step() of the recording was never called, so it is not known where a step ends. "
    "Call it at the end of each step.",
    fits="record(steps=1, warmup=1, timing_steps=0)",
)
_IN_CELL = Wording(
    who="The cell",
    no_step="The cell made no optimizer step, so it is not known where a training step ends. "
    "In a loop without a torch.optim optimizer, call recompute_scan.step() at the end of each "
    "step.",
    fits="%%recompute --steps 1 --warmup 1 --timing-steps 0",
)
_RECORDED = "recompute-scan: recorded; the answer is shown when the cell ends or is interrupted"
_current: Recording | None = None


class Recording:
    """A recording of a training loop; made by :func:`record`, and used in a ``with`` statement.

    Attributes:
        info: This rank's run record, once recording is over; ``None`` before.
    """

    def __init__(
        self, plan: Plan, device: Literal["auto", "cpu", "cuda"], folder: Path | None
    ) -> None:
        self._plan = plan
        self._device = device
        self._folder = folder
        self._gives_way = False
        self._wording = _WORDING
        self._hooks: StepHooks | None = None
        self._home: Home | None = None
        self._guard = Guard()
        self._live: Recorder | None = None
        self._unwritten: UsageError | None = None
        self._scan: Scan | None = None
        self.info: RunInfo | None = None

    def __enter__(self) -> Recording:
        self.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    @property
    def under_way(self) -> bool:
        """Whether recording has begun; it may still wait for other ranks."""
        return self._live is not None

    @property
    def done(self) -> bool:
        """Whether everything is recorded; true after the same step on every rank."""
        return self._live is None and self.info is not None

    @property
    def scan(self) -> Scan:
        """The answer about the recorded steps, of all ranks in the folder.

        Analysed when first asked for; available once :attr:`done`, and after the block.

        Raises:
            UsageError: The recording has not begun or is under way (``E231``), or its folder
                could not be written (``E206``).
            RunError: No trace came out of it (``E309``); the second line says why.
        """
        if self._live is not None or self.info is None or self._home is None:
            raise UsageError(
                "E231",
                "There is no scan yet: the recording has not ended.",
                hint="ask for .scan after the `with` block, or when .done is true",
            )
        if self._scan is None:
            if self._unwritten is not None:
                raise self._unwritten
            self._scan = self._home.scan(self.info)
        return self._scan

    def begin(self, *, gives_way: bool = False, in_cell: bool = False) -> None:
        """Begin to watch, as entering the block does. The model is best made after this.

        Args:
            gives_way: Whether the next recording may end this one: for whoever may never hear that
                the training has failed, or that there was none.
            in_cell: Whether a notebook's cell is recorded. Nothing calls :meth:`step` then:
                optimizers end a step, or ``recompute_scan.step()``, as under ``run``.

        Raises:
            UsageError: This process is being recorded already (``E230``), or the folder cannot
                be written (``E206``).
        """
        global _current
        if _current is not None and _current._gives_way:
            _current.end(RuntimeError("the training did not say that it ended"))
        if _current is not None or is_recorded():
            who = "another recording" if _current else "recompute-scan run, or a guard,"
            raise UsageError(
                "E230",
                "This process is being recorded already.",
                why=f"{who} is under way, and torch runs one profiler at a time",
                hint="end the other one first: its `with` block, or its end()",
            )
        home = Home(self._folder)
        prepare(home.path)
        self._home, self._scan, self._unwritten, self.info = home, None, None, None
        self._gives_way = gives_way
        guard = self._guard = Guard()
        recorder = Recorder(self._plan, home.path, guard, device=self._device, keep_going=True)
        self._live, _current = recorder, self
        installs: list[Callable[[], object]] = [
            recorder.graphs.install,
            partial(install_self_test, recorder.probe),
            recorder.others.install,
        ]
        if in_cell:
            self._wording = _IN_CELL
            self._hooks = StepHooks(recorder.counter, self._found_step, self._restart, guard)
            installs += [self._hooks.install, self._hooks.adopt]
        for install in installs:
            guard.run(install, otherwise=None)

    def step(self) -> None:
        """A training step has ended: call this at the end of each, after the optimizer's step.

        Once everything is recorded it does nothing.

        Raises:
            UsageError: The recording has not begun (``E231``).
        """
        live = self._live
        if live is None:
            if self._home is None:
                raise UsageError(
                    "E231",
                    "step() was called before the recording began.",
                    hint="with recompute_scan.record(steps=5) as recording: …",
                )
            return
        self._pass_boundary(live, EXPLICIT)

    def _found_step(self) -> None:
        if self._live is not None:
            self._pass_boundary(self._live, None)

    def _restart(self) -> None:
        if self._live is not None:
            self._guard.run(self._live.restart, otherwise=None)

    def _pass_boundary(self, live: Recorder, event: str | None) -> None:
        """A step has ended, with an event that is not counted yet, or with one that is."""
        self._guard.run(partial(self._look, live, event), otherwise=None)
        if live.idle and self.info is None:
            self._leave(live)
            if self._hooks is not None and live.kept.trace is not None:
                self._guard.run(partial(print, _RECORDED), otherwise=None)
        if live.over or self._guard.failure is not None:
            self._live = None

    def _look(self, live: Recorder, event: str | None) -> None:
        if is_capturing():
            return
        if event is not None:
            live.counter.saw(event)
        if self.info is None:
            live.probe.look_at_gradients()
        live.boundary()

    def end(self, error: BaseException | None = None) -> None:
        """End it, as leaving the block does: nothing is left in the process.

        Where a folder was given and nothing failed, rank 0 writes the result and the page too.
        A recording that gave no trace is warned of.

        Args:
            error: What ended the loop, if it failed.
        """
        live, self._live = self._live, None
        if self._hooks is not None:  # not with the last step: torch iterates over its hooks then
            self._hooks.remove()
            self._hooks = None
        if live is not None and self.info is None:
            self._leave(live, error)
        if error is not None or self.info is None or self.info.rank != 0 or self._home is None:
            return
        if self._home.lasting or self.info.trace is None:
            try:
                _ = self.scan
            except ScanError as said:
                warnings.warn(f"recompute-scan: {said}", RuntimeWarning, stacklevel=3)

    @as_before()
    def _leave(self, live: Recorder, error: BaseException | None = None) -> None:
        """Take everything out of the process, and write the run record."""
        global _current
        try:
            for remove in (live.finish, live.others.remove, live.probe.remove, live.graphs.remove):
                self._guard.run(remove, otherwise=None)
            live.graphs.write()
        finally:
            _current = None
        end = failure = None
        status = 0
        if isinstance(error, Exception):
            end = end_of(error, live.counter.steps, live.probe)
            failure, status = f"The loop raised {type(error).__name__}: {error}.", 1
        elif isinstance(error, KeyboardInterrupt):
            failure, status = "The loop was interrupted.", _INTERRUPTED
        self.info = make_run_record(
            live,
            "a notebook's cell" if self._wording is _IN_CELL else (*sys.argv, "")[0] or "python",
            failure=failure,
            status=status,
            end=end,
            wording=self._wording,
        )
        try:
            write_run_info(live.kept.folder, self.info)
        except OSError as unwritten:
            self._unwritten = cannot_write(live.kept.folder, unwritten)


def record(
    steps: int = 5,
    *,
    warmup: int = 3,
    timing_steps: int = 10,
    folder: str | os.PathLike[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Recording:
    """A recording of the training loop in its ``with`` block, which calls ``step()``.

    The steps are used as by ``recompute-scan run``: warm-up, timed, one that warms the profiler
    up, profiled, one with Python stacks; 20 by default. Later steps run as if
    nothing had been there.

    Args:
        steps: Steps to profile, 1 or more.
        warmup: Steps before anything is recorded, 1 or more.
        timing_steps: Steps to time without the profiler; 0 for none.
        folder: Where traces, the run record, the result and its page go, one folder for all ranks
            of a run; ``None`` for a temporary one that lives as long as the scan does.
        device: Device to record; ``auto`` takes the GPU where the loop uses one.

    Raises:
        UsageError: Impossible step counts (``E204``), or no GPU although one is asked for
            (``E205``).
    """
    plan = Plan(warmup=warmup, timing=timing_steps, steps=steps)
    check_plan(plan)
    check_device(device)
    return Recording(plan, device, None if folder is None else Path(folder))
