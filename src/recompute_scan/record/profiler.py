"""One profiler window: a fixed number of steps recorded into one gzipped trace."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from recompute_scan.files import make_new
from recompute_scan.record import ranges
from recompute_scan.record.compat import import_ahead
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.launch.forks import let_forked_processes_end
from recompute_scan.record.patches import Patches
from recompute_scan.record.quiet import without_grad_warnings, without_kineto_noise, without_modes

# More than plain recordings of a few steps have come to.
_ENOUGH_BYTES = 4 << 30

import_ahead()


class ProfilerWindow:
    """A profiler that warms up for ``lead`` steps, then records ``steps`` of them.

    The first call to :meth:`step` after :meth:`start` ends the first of these steps.
    """

    def __init__(
        self, *, lead: int, steps: int, device: Literal["cpu", "cuda"], stacks: bool
    ) -> None:
        self._lead = lead
        self._steps = steps
        self._passed = 0
        self._closed = False
        self._filters = without_grad_warnings() if stacks else nullcontext()
        activities = [ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # torch.profiler.schedule warns when warmup is 0, hence a function of our own.
        self._profiler = profile(
            activities=activities,
            schedule=self._action,
            record_shapes=not stacks,
            with_stack=stacks,
            # Two events for each tensor; this step is not used for times. On a CPU torch
            # writes a line to the script's standard error when a tensor from before is freed.
            profile_memory=stacks and device == "cuda",
        )

    @property
    def completed(self) -> int:
        """Steps recorded from their beginning to their end."""
        return max(0, self._passed - self._lead)

    @property
    def begun(self) -> bool:
        """Whether there is anything in the recording: its warm-up is over."""
        return self._passed >= self._lead

    @property
    def full(self) -> bool:
        """Whether every wanted step is recorded."""
        return self.completed >= self._steps

    def start(self) -> None:
        """Begin at a step boundary."""
        let_forked_processes_end()
        self._filters.__enter__()
        with without_kineto_noise(), without_modes():
            self._profiler.start()

    def step(self) -> None:
        """Pass a step boundary; the recording closes by itself at the last."""
        self._passed += 1
        if self.full:
            self.stop()
        elif self._passed == self._lead:
            with without_kineto_noise(), without_modes():
                self._profiler.step()
        else:
            with without_modes():
                self._profiler.step()

    def stop(self) -> None:
        """Close the recording where it is."""
        if not self._closed:
            self._closed = True
            with without_kineto_noise(), without_modes():
                self._profiler.stop()
            self._filters.__exit__(None, None, None)
            backend = self._profiler.profiler
            if backend is not None and backend.kineto_results is not None:  # it may not have begun
                ranges.end_left_open(backend.kineto_results)

    def export(self, target: Path) -> None:
        """Write the closed recording, gzipped; the file appears whole or not at all.

        The recording is written plain first, which takes ten times the room and more.

        Raises:
            OSError: It cannot be written.
        """
        plain = _room(target.parent) / f".{target.name}.{os.getpid()}.json.part"
        packed = target.with_name(f".{target.name}.part")
        unfinished = plain.with_name(f"{plain.name}.tmp")  # torch's
        try:
            for file in (plain, packed):
                make_new(file)
            unfinished.unlink(missing_ok=True)
            with without_kineto_noise():
                self._profiler.export_chrome_trace(str(plain))
            if not plain.stat().st_size:  # it says why on standard error, and raises nothing
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(plain))
            # Bytes, not text: some versions of torch write names that are not valid UTF-8.
            with (
                plain.open("rb") as source,
                packed.open("wb") as raw,
                gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
            packed.replace(target)
        finally:
            plain.unlink(missing_ok=True)
            unfinished.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)

    def _action(self, step: int) -> ProfilerAction:
        if step < self._lead:
            return ProfilerAction.WARMUP
        if step < self._lead + self._steps - 1:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE


def _room(folder: Path) -> Path:
    """Where a plain recording has room: the folder, or the system's own for temporary files.

    torch writes a recording once, and what it cannot write is lost.
    """
    others = Path(tempfile.gettempdir())
    try:
        str(folder).encode()  # torch takes no name that is no UTF-8
    except UnicodeEncodeError:
        return others
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < _ENOUGH_BYTES and shutil.disk_usage(others).free > free:
            return others
    return folder


class OtherProfilers:
    """Notices profilers of the script's own: torch runs only one at a time.

    Starting a second one raises in whoever starts it. That must never be the script, so
    ``give_way`` is called before one of its profilers starts. What one of them leaves open when it
    ends is ended, as for ours, since ours may be the next.
    """

    def __init__(self, give_way: Callable[[], None], guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._give_way = give_way
        self._ours = False
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches = Patches()

    def install(self) -> None:
        """Begin to watch."""
        for kind, names in _STARTS.items():
            for name in names:
                if hasattr(kind, name):
                    starts = self._guard.around(getattr(kind, name), self._starts)
                    self._patches.replace(kind, name, starts)
            ends = self._guard.around(kind.__exit__, self._ends)
            self._patches.replace(kind, "__exit__", ends)
        name = "_call_end_callbacks_on_future"
        later = getattr(autograd_profiler.record_function, name, None)
        if later is not None:
            ends = self._guard.around(later, self._ends_later)
            self._patches.replace(autograd_profiler.record_function, name, ends)

    def remove(self) -> None:
        """Stop watching."""
        self._patches.undo()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Profilers that start or end in the body are our own."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def running(self) -> bool:
        """Whether some profiler records in this thread now, or one of the script's warms up.

        A profiler that starts while another warms up cancels that one, which then records into
        memory that is no longer its own.
        """
        return bool(self._begun) or bool(torch._C._autograd._profiler_enabled())

    def _starts(self, call: Call, profiler: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._ours and profiler.enabled:
            self._give_way()
            self._begun.add(profiler)
        return call(profiler, *args, **kwargs)

    def _ends_later(self, call: Call, own: Any, future: Any) -> Any:
        """In a window of ours a range ends where its block ends, and not with a future.

        That may come when the window is over, and would write into memory that is freed by then.
        """
        if torch._C._autograd._profiler_enabled() and not self._begun:
            return future
        return call(own, future)

    def _ends(self, call: Call, profiler: Any, *args: Any, **kwargs: Any) -> Any:
        self._begun.discard(profiler)
        result = call(profiler, *args, **kwargs)
        if not self._ours and profiler.enabled:
            if isinstance(profiler, autograd_profiler.profile):
                if profiler.kineto_results is not None:
                    ranges.end_left_open(profiler.kineto_results)
            else:
                ranges.end_left_open(None)
        return result


# What starts a profiler, by class: the two of the first are called one after the other.
_STARTS: dict[Any, tuple[str, ...]] = {
    autograd_profiler.profile: ("_prepare_trace", "_start_trace"),
    autograd_profiler.emit_itt: ("__enter__",),
    autograd_profiler.emit_nvtx: ("__enter__",),
}
