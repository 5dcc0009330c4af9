"""Profiler windows, and the graphs that the compiler makes: the files that torch writes for us.

A range of ``record_function`` keeps a pointer into the memory of the profiler under which it was
opened. torch frees that memory when the profiler ends, and writes to it when the range closes, if
any other profiler runs in its thread by then (``onFunctionExit`` in profiler_kineto.cpp and
``RecordFunction::end`` in record_function.cpp, the same in 2.1 to 2.13): scripts die of it, at once
or much later. With no profiler running it writes nothing, and a range that has been ended twice is
as one ended once. So what a profiler leaves open is ended while none runs. Ranges that cannot be
got hold of (in compiled code, or of torch's operators called directly) leave the process
unsafe for another profiler.

Some versions' Kineto writes lines to file descriptor 2 whenever a profiler starts or stops; no
setting turns them off. The descriptor is redirected only while our own calls into
the profiler last, and everything else that was written meanwhile is passed on.

The compiler writes every graph to the logger behind ``TORCH_TRACE``, from a warm cache too. Graphs
are read from there until recording is over; a timed step compiles nothing.
"""

from __future__ import annotations

import _thread
import errno
import gc
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from time import monotonic, strftime
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch
from isal import igzip
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from recompute_scan.compiled.logs import wanted_name, write_record
from recompute_scan.files import made, make_new, opened, write_whole
from recompute_scan.record.isolation import Call, Guard, Patches, let_forked_processes_end
from recompute_scan.record.steps import wait_for_gpus
from recompute_scan.record.torch_versions import PROFILER_LINE, import_ahead, stacks_crash
from recompute_scan.result.run_record import compiled_name
from recompute_scan.terminal import (
    file_at,
    fresh_line,
    is_terminal,
    still,
    unless_closed,
    without_lines,
)

# Names of ranges that could not be ended, of profilers that have ended in this process.
_left: Counter[str] = Counter()


def end_left_open(events: list[Any] | None) -> None:
    """A profiler has ended: end the ranges that it leaves open.

    Args:
        events: Those of its ``kineto_results``; ``None`` where there are none, as for
            ``emit_nvtx``: then every open range is ended.
    """
    unfinished = None
    if events is not None:
        # No thread has ended them: logical thread numbers begin at 1.
        names = (event.name() for event in events if not event.end_thread_id())
        unfinished = Counter(names)
        if not unfinished:
            return
    found: Counter[str] = Counter()
    handles = []
    for one in gc.get_objects():
        # type(), because isinstance() asks proxies for their class, and may run anything.
        opened = issubclass(type(one), record_function) and one.record is not None
        if opened and (unfinished is None or one.name in unfinished):
            found[one.name] += 1
            handles.append(one.record)
    _end(handles)
    _left.update((unfinished or Counter()) - found)


def _end(handles: list[Any]) -> None:
    """End ranges where no profiler runs and no mode of dispatch is on: in a new thread."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            for handle in handles:
                torch.ops.profiler._record_function_exit._RecordFunction(handle)
        finally:
            done.release()

    # Not a threading.Thread: the script would find it among its own.
    _thread.start_new_thread(run, ())
    done.acquire()


_GRAD = re.compile(r"The \.grad attribute of a Tensor")
_REMIND_S = 10.0
# The modules that warn in calls of ours.
_OURS = re.compile(r"torch(\.|$)|recompute_scan(\.|$)|contextlib$")


def without_kineto_noise() -> AbstractContextManager[None]:
    """Run the body with Kineto's log lines left out of standard error."""
    return without_lines(2, PROFILER_LINE)


def without_grad_warnings() -> AbstractContextManager[None]:
    """Run the body without torch's warning on ``.grad`` of tensors that are no leaves.

    To record stacks, torch reads ``.grad`` of every tensor that a module holds, FSDP's views among
    them.
    """
    return _ignoring(_GRAD, None)


def without_own_warnings() -> AbstractContextManager[None]:
    """Run the body, calls of ours into torch, without torch's warnings in them: a script may
    make errors of warnings, and would print the others.
    """
    return _ignoring(None, _OURS)


@contextmanager
def _ignoring(message: re.Pattern[str] | None, module: re.Pattern[str] | None) -> Iterator[None]:
    """The filter goes straight into the list, since all that :mod:`warnings` has for it makes
    Python show every other warning once more.
    """
    filters: Any = warnings.filters
    entry = ("ignore", message, Warning, module, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        with suppress(ValueError):  # the script has reset its filters
            filters.remove(entry)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run the body with no mode of the script's on, which would see the profiler's operators."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Progress:
    """Says each phase once, where wanted; ``logs`` has it write to a log too, with the time."""

    def __init__(self, *, wanted: bool = True, logs: bool = False, quiet: bool = False) -> None:
        # The script may put something else in its place, which is not ours to write to.
        self._stream, self._file = None if quiet else sys.stderr, file_at(2)
        self._on = wanted and self._stream is not None
        self._logs = logs
        self._said, self._last_s = "", monotonic()

    def show(self, text: str, step: int | None = None) -> None:
        """Print it, unless it was printed last; in a log only with the step that has ended."""
        if not self._on or text == self._said:
            return
        if is_terminal(self._stream):
            self.say(text)
        elif self._logs and step is not None:
            self.say(f"{strftime('%H:%M:%S')} step {step}: {text}")
        self._said = text

    def remind(self, step: str, left: str) -> None:
        """Say how far it is, on a terminal that has had no line for ten seconds."""
        if self._on and monotonic() - self._last_s > _REMIND_S and is_terminal(self._stream):
            self.say(f"{step}: {self._said}; {left}")

    def say(self, text: str) -> None:
        self._last_s = monotonic()
        self._stream = still(self._stream, 2, self._file)
        if self._stream is not None:
            line = f"{fresh_line(self._stream)}recompute-scan: {text}"
            with unless_closed():
                print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """Say nothing from here on: another rank does."""
        self._on = False


# More than plain recordings of a few steps have come to.
_ENOUGH_BYTES = 4 << 30

import_ahead()


def no_profiler() -> str | None:
    """Why no profiler may start any more in this process; ``None`` where one may."""
    if not _left:
        return None
    names = ", ".join([*_left][:3])
    return (
        f"a profiler of torch ended while ranges were open ({names}), and another one could "
        "make torch crash when they close"
    )


def no_stacks() -> str | None:
    """Why no profiler with Python stacks may run; ``None`` where it may."""
    if stacks_crash():
        return (
            f"on Python 3.13 torch {torch.__version__} crashes when it records them; torch 2.7.1 "
            "does not"
        )
    if any(one != one.encode(errors="ignore").decode() for one in _names()):
        return "the name of a file or function is not valid UTF-8, which crashes torch"
    if sys.getprofile() is not None or threading.getprofile() is not None:
        return (
            "the script has set a profile function (sys.setprofile, cProfile), which torch "
            "would take out"
        )
    if getattr(torch._C, "_len_torch_function_stack", lambda: 0)():
        return "the script has a TorchFunctionMode on, which would see torch look at gradients"
    return None


def _names() -> Iterator[str]:
    """Names of the code that runs and of all functions, and paths of all modules."""
    for frame in sys._current_frames().values():
        yield from (one.f_code.co_filename for one, _ in traceback.walk_stack(frame))
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str):
            yield file
    for one in gc.get_objects():
        if type(one) is FunctionType:
            yield one.__code__.co_filename
            yield one.__code__.co_name


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
        self._closed = self._holds_trace = False
        self._traces: object = None
        self._on_gpu = device == "cuda"
        self._memory = stacks and self._on_gpu
        self._filters = without_grad_warnings() if stacks else nullcontext()
        activities = [ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # torch.profiler.schedule warns when warmup is 0, hence this function of ours.
        self._profiler = profile(
            activities=activities,
            schedule=self._action,
            record_shapes=not stacks,
            with_stack=stacks,
            # Two events for each tensor; this step is not used for times.
            profile_memory=self._memory,
        )

    @property
    def completed(self) -> int:
        """Steps recorded from their beginning to their end."""
        return max(0, self._passed - self._lead)

    @property
    def holds_trace(self) -> bool:
        """Whether there is a trace to export, once it is closed.

        Another profiler that has begun meanwhile leaves torch's recording without one, and to
        export that ends the process.
        """
        return self.begun and self._holds_trace

    @property
    def begun(self) -> bool:
        """Whether there is anything in the recording: its warm-up is over."""
        return self._passed >= self._lead

    @property
    def full(self) -> bool:
        """Whether every wanted step is recorded."""
        return self.completed >= self._steps

    def start(self) -> None:
        let_forked_processes_end()
        if self._on_gpu and not self._lead:
            wait_for_gpus()
        self._filters.__enter__()
        with without_kineto_noise(), without_modes():
            before = torch.empty(1, device="cpu") if self._memory else None
            self._profiler.start()
            # With memory recorded, the first tensor on the CPU that was there before and is freed
            # has torch write a line of it, and each 1,000th after that: this is the first.
            del before
        self._traces = sys.getprofile()

    def step(self) -> None:
        """Pass a step boundary; the recording closes by itself at the last."""
        self._passed += 1
        if self.full:
            self.stop()
            return
        begins = self._passed == self._lead
        if begins and self._on_gpu:
            wait_for_gpus()  # what a GPU still has to do belongs to the steps before
        with without_kineto_noise() if begins else nullcontext(), without_modes():
            self._profiler.step()

    def stop(self) -> None:
        if not self._closed:
            self._closed = True
            own = sys.getprofile()  # torch's, or one that the script has put in its place
            with without_kineto_noise(), without_modes():
                self._profiler.stop()
            if own is not self._traces and callable(own):
                sys.setprofile(own)
            self._filters.__exit__(None, None, None)
            backend = self._profiler.profiler
            results = None if backend is None else backend.kineto_results  # it may not have begun
            if results is not None:
                end_left_open(events := results.events())
                self._holds_trace = bool(events)

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
            make_new(plain)
            unfinished.unlink(missing_ok=True)
            with without_kineto_noise():
                self._profiler.export_chrome_trace(str(plain))
            if not plain.stat().st_size:  # it says why on standard error, and raises nothing
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(plain))
            # Bytes, not text: some versions of torch write names that are not valid UTF-8.
            with (
                opened(plain) as source,
                made(packed) as raw,
                # A tenth of the time that Python's own takes, and a fifth more room.
                igzip.IGzipFile(
                    filename="", fileobj=raw, mode="wb", compresslevel=2, mtime=0
                ) as out,
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
    if not str(folder).isprintable():  # torch takes no name that is no UTF-8, and no line's end
        return others
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < _ENOUGH_BYTES and shutil.disk_usage(others).free > free:
            return others
    return folder


class OtherProfilers:
    """Notices profilers of the script: torch runs only one at a time.

    Starting a second one raises in whoever starts it. That must never be the script, so
    ``give_way`` is called before one of its profilers starts. Ranges that one of them leaves open
    when it ends are ended, as for ours, since ours may be the next.
    """

    def __init__(self, give_way: Callable[[], None], guard: Guard) -> None:
        self._guard = guard
        self._give_way = give_way
        self._ours = False
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches = Patches()

    def install(self) -> None:
        for kind, names in _STARTS.items():
            for name in names:
                if hasattr(kind, name):
                    # Also when the recording has failed: its profiler may run to the step's end.
                    self._patches.wrap(self._guard, kind, name, self._starts, vital=True)
            self._patches.wrap(self._guard, kind, "__exit__", self._ends)
        name = "_call_end_callbacks_on_future"
        if hasattr(record_function, name):
            self._patches.wrap(self._guard, record_function, name, self._ends_later)

    def remove(self) -> None:
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
                    end_left_open(profiler.kineto_results.events())
            else:
                end_left_open(None)
        return result


# The methods that start a profiler, by class; the first class calls both in turn.
_STARTS: dict[Any, tuple[str, ...]] = {
    autograd_profiler.profile: ("_prepare_trace", "_start_trace"),
    autograd_profiler.emit_itt: ("__enter__",),
    autograd_profiler.emit_nvtx: ("__enter__",),
}


_LOGGER = "torch.__trace"
_MISSING = "The recomputes of compiled code are not known"


class CompiledGraphs(logging.Handler):
    """Takes the graphs of this process, which is of the rank that ``rank`` knows last."""

    def __init__(self, folder: Path, rank: Callable[[], int], guard: Guard) -> None:
        super().__init__()
        self._folder = folder
        self._rank = rank
        self._guard = guard
        self._process = os.getpid()
        self._taken: list[str] = []
        self._written = 0

    def install(self) -> None:
        logging.getLogger(_LOGGER).addHandler(self)

    def remove(self) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Take a record, if it is one that is needed; raises nothing."""
        with self._guard.part(_MISSING):
            if os.getpid() == self._process:
                self._take(record)
        return True

    def write(self) -> None:
        """Write what has been taken so far; the file appears whole or not at all."""
        taken = list(self._taken)
        if os.getpid() != self._process or len(taken) == self._written:
            return
        with self._guard.part(_MISSING):
            text = "".join(taken).encode("utf-8", errors="replace")
            write_whole(self._folder / compiled_name(self._rank()), text)
            self._written = len(taken)

    def _take(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "metadata", None)
        if not isinstance(fields, dict) or wanted_name(fields) is None:
            return
        payload = getattr(record, "payload", None)
        # Sizes and stacks of all that was traced are long, and not needed here.
        short = {
            name: {} if isinstance(one, dict) and name != "artifact" else one
            for name, one in fields.items()
        }
        self._taken.append(write_record(short, payload if isinstance(payload, str) else ""))
