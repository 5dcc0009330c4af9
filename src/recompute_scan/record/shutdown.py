"""The end of a script that is stopped once everything is recorded.

It ends as if its main thread had raised ``SystemExit``: whichever thread made the last step,
the main one is stopped too. Threads that wait then for something that no longer comes (a queue
of the training thread, a child process that listens) get some seconds, and threads that work on,
such as one that writes a checkpoint, get longer.
"""

from __future__ import annotations

import _thread
import faulthandler
import functools
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import _exit, close
from pathlib import Path
from time import monotonic, process_time, sleep
from types import FrameType
from typing import Any

from recompute_scan.files import content
from recompute_scan.record.execute import StopRecording
from recompute_scan.terminal import file_at

# How long nothing may move, of a process alone, of one that may wait for other ranks, and of one
# with a main thread that waits while others work. A loader of torch's waits 5 s for a worker.
_WAITS_S, _WAITS_FOR_RANKS_S, _WORKS_S = 6.0, 30.0, 60.0
# The same at the interpreter's end, which waits for threads and processes without a limit.
_JOINS_S = 3.0
_LOOK_S = 0.25
# So many steps after the first at which it was stopped, a script catches whatever would stop it.
_STEPS_ON = 20
# A share of a processor, and bytes read and written in a look, from which on a process works.
_BUSY, _MOVED_BYTES = 0.2, 1 << 16
# Functions that the interpreter runs at its end to wait for threads and processes.
_JOINS = {
    ("threading", "_shutdown"),
    ("concurrent.futures.thread", "_python_exit"),
    ("multiprocessing.util", "_exit_function"),
}
_END_S = 1.0
# How long a process that SIGTERM ends may wait for the end of a step that it records: most
# schedulers kill after 30 s.
_STEP_S = 10.0
# How long after the signal the thread that listens to it may take to run.
_HEARD_S = 1.0
# The lowest number of a descriptor of ours.
_HIGH = 200
TERMINATED = 143
# Streams of a script that has left by `os._exit`: a stream that is deleted is flushed.
_DROPPED: list[Any] = []
# The exit status that the process would end with.
_STATUS = [0]


def _frames_of(thread: int) -> Iterator[FrameType]:
    """The calls that a thread is in, the innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(thread: int) -> tuple[tuple[int, int], ...]:
    """Where a thread is in its Python code, the innermost call first."""
    return tuple((id(frame.f_code), frame.f_lasti) for frame in _frames_of(thread))


def _bytes_moved() -> int:
    with suppress(OSError, ValueError):
        lines = content(Path("/proc/self/io")).splitlines()[:2]
        return sum(int(line.partition(b":")[2]) for line in lines)
    return 0


def _wait_until_it_waits(main: int, over: Callable[[], bool], limit_s: Callable[[], float]) -> bool:
    """Return once a thread has not moved for so long, and say so; or once all is over."""
    place, cpu_s, moved_bytes = place_of(main), process_time(), _bytes_moved()
    moved = worked = monotonic()
    while not over():
        sleep(_LOOK_S)
        now, before = monotonic(), (place, cpu_s, moved_bytes)
        place, cpu_s, moved_bytes = place_of(main), process_time(), _bytes_moved()
        if place != before[0]:
            moved = worked = now
        elif cpu_s - before[1] > _BUSY * _LOOK_S or moved_bytes - before[2] >= _MOVED_BYTES:
            worked = now
        if now - worked >= limit_s() or now - moved >= _WORKS_S:
            return not over()
    return False


class Stopping:
    """Sees a script to its end, from the moment at which it is first stopped.

    Made in the script's main thread.

    Args:
        alone: Whether there are no other ranks that may be waited for.
        end: Called in another thread where the main one waits for good; must end the process.
    """

    def __init__(self, alone: Callable[[], bool], end: Callable[[], None]) -> None:
        self._alone = alone
        self._end = end
        self._main = threading.get_ident()
        self._process = os.getpid()
        self._signal: int | None = None
        self._handler: Callable[[int, FrameType | None], None] | None = None
        self._asked = 0
        self.begun = False
        self.over = False

    def install(self) -> None:
        """Be able to interrupt the main thread, whatever it waits for: a signal does."""
        if threading.current_thread() is not threading.main_thread():
            return
        last = int(getattr(signal, "SIGRTMAX", signal.SIGURG))
        for number in (last - 1, last - 2, int(signal.SIGURG)):
            with suppress(ValueError, OSError):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handler = self._stop_main
                    signal.signal(number, self._handler)
                    self._signal = number
                    return

    def remove(self) -> None:
        self.over = True
        number, self._signal = self._signal, None
        if number is not None and signal.getsignal(number) == self._handler:
            with suppress(ValueError):
                signal.signal(number, signal.SIG_DFL)

    @property
    def here(self) -> bool:
        """Whether this is the main thread."""
        return threading.get_ident() == self._main

    def at_step(self) -> None:
        """The script is being stopped as a step of it ends; one that goes on and on is ended."""
        if self.here and os.getpid() == self._process:
            self._asked += 1
            if self._asked > _STEPS_ON:
                self._end()
        self.begin()

    def begin(self) -> None:
        """The script is being stopped, in this thread."""
        if self.begun or os.getpid() != self._process:
            return
        self.begun = True
        _thread.start_new_thread(self._see_to_the_end, ())
        number = self._signal
        if not self.here and number is not None and signal.getsignal(number) == self._handler:
            with suppress(OSError, ValueError):
                signal.pthread_kill(self._main, number)

    def _stop_main(self, number: int, frame: FrameType | None) -> None:
        if not self.over and os.getpid() == self._process:
            raise StopRecording(0)

    def _see_to_the_end(self) -> None:
        limit_s = _WAITS_S if self._alone() else _WAITS_FOR_RANKS_S
        if _wait_until_it_waits(self._main, lambda: self.over, lambda: limit_s):
            self._end()


class Termination:
    """Lets a process that is alone report before SIGTERM ends it, as a scheduler's limit does.

    The script finds no handler: the one that is here is below Python's, and goes where the script
    sets another. A process that a launcher ends is ended at once: it waits for all of them.

    Args:
        may_wait: Whether the step that goes on is worth the time until it ends.
        report: Keeps what there is and reports; called once, with whether a step has just ended in
            the thread that it is called in.
    """

    def __init__(self, may_wait: Callable[[], bool], report: Callable[[bool], None]) -> None:
        self._may_wait = may_wait
        self._report = report
        self._process = os.getpid()
        self._pipe: tuple[Any, Any] | None = None
        self._one = threading.Lock()
        self._file: tuple[int, int] | None = None
        self.asked = self._ends = self._over = False

    def install(self, *, alone: bool) -> None:
        """Begin to listen, where the signal would end the process."""
        free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not (alone and free and hasattr(faulthandler, "register")):
            return
        reader, writer = map(_out_of_the_way, os.pipe())
        os.set_blocking(writer, False)
        self._file = file_at(reader)
        self._pipe = reader, os.fdopen(writer, "wb", buffering=0, closefd=False)
        self.listen_to_it(True)
        _LISTENING.append(self)
        _stop_for_forks()
        _thread.start_new_thread(self._listen, ())

    def listen_to_it(self, listens: bool) -> None:
        """Take the signal, or leave it as it was; a handler of the script's stays."""
        if self._pipe is None or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        if listens:
            faulthandler.register(signal.SIGTERM, file=self._pipe[1], all_threads=False)
        else:
            faulthandler.unregister(signal.SIGTERM)

    def remove(self) -> None:
        """The script is over, or this is a process that it has forked."""
        pipe = self._pipe
        if pipe is not None:
            _LISTENING.clear()
            with suppress(Exception):
                self.listen_to_it(False)
                self._pipe = None
                if self._is_ours(pipe[1].fileno()):
                    close(pipe[1].fileno())

    def hold(self) -> None:
        """A step has ended: nothing more is done where the process is being ended."""
        if self._ends:
            _wait_for_the_end()

    def at_step(self) -> None:
        """The step is kept: where the process is to end, it does so here."""
        if self.asked:
            self._end(True)

    def begin_to_end(self) -> None:
        """The script has ended by itself, unless it is being ended."""
        self._over = True
        if self._signalled():
            _wait_for_the_end()
        self._claim()

    def _claim(self) -> None:
        if not self._one.acquire(blocking=False):
            _wait_for_the_end()

    def _signalled(self) -> bool:
        """Has the signal come? The thread that listens may not have run since."""
        pipe, deadline = self._pipe, monotonic() + _HEARD_S
        with suppress(OSError, ValueError):
            while pipe is not None and not self.asked and monotonic() < deadline:
                if not (self._is_ours(pipe[0]) and _is_readable(pipe[0], 0)):
                    break
                sleep(_LOOK_S)
        return self.asked

    def _listen(self) -> None:
        pipe = self._pipe
        with suppress(OSError):  # a script may close all that it has not opened
            if pipe is None:
                return
            reader = pipe[0]
            # Not read: it stays readable for the main thread, which may look before this one runs.
            readable = _is_readable(reader, None) and self._pipe is not None
            if self._is_ours(reader):
                self.asked = readable
                close(reader)
            elif self._pipe is not None:
                self.listen_to_it(False)  # the signal ends the process, as without us
        if not self.asked:
            return
        deadline = monotonic() + _STEP_S
        while self._may_wait() and not self._over and monotonic() < deadline:
            sleep(_LOOK_S)
        self._end(False)

    def _is_ours(self, descriptor: int) -> bool:
        """Is it an end of the pipe? A script may close descriptors, and use their numbers."""
        return file_at(descriptor) == self._file

    def _end(self, at_step: bool) -> None:
        if os.getpid() != self._process:
            return
        self._claim()
        self._ends = True
        try:
            with suppress(Exception):
                self._report(at_step)
        finally:
            flush()
            self.remove()
            os.kill(self._process, signal.SIGTERM)
            _wait_for_the_end()


def _out_of_the_way(descriptor: int) -> int:
    """The same under a high number, where there is one: scripts close and use the low ones."""
    import fcntl  # noqa: PLC0415 - of Unix

    with suppress(OSError):
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        close(descriptor)
        return high
    return descriptor


def _is_readable(pipe: int, wait_ms: int | None) -> bool:
    """Whether bytes are there by then; an end that was closed has none."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(wait_ms))


# The one of this process; at most one.
_LISTENING: list[Termination] = []


@functools.cache
def _stop_for_forks() -> None:
    """Fork processes without the handler: a signal that ends such a process is not for this one."""

    def turn(listens: bool) -> None:
        for one in _LISTENING:
            with suppress(Exception):
                one.listen_to_it(listens)

    os.register_at_fork(before=lambda: turn(False), after_in_parent=lambda: turn(True))


@contextmanager
def on_sigterm(handler: Any) -> Iterator[None]:
    """Have the signal handled so while the body runs; for the main thread only."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for_the_end() -> None:
    while True:
        sleep(_WORKS_S)


def drop_buffers() -> None:
    """Write no more of the script's output than it has flushed, but let us print."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        _DROPPED.append(getattr(sys, name))
        stream = None
        with suppress(OSError):
            stream = os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace")
        setattr(sys, name, stream)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def leave_now(status: int) -> None:
    """End this process with this status, and no more than what is printed so far."""
    flush()
    _exit(status)


def ends_with(status: int) -> None:
    """The process is about to end with this status."""
    _STATUS[0] = status


def see_that_it_ends() -> None:
    """The script was stopped: its threads and processes keep the interpreter from its end no longer
    than some seconds.
    """
    with suppress(RuntimeError, AttributeError):  # the end has begun
        threading._register_atexit(_see_that_it_ends, os.getpid())  # type: ignore[attr-defined]


def _see_that_it_ends(process: int) -> None:
    if os.getpid() != process:
        return
    with suppress(RuntimeError):  # early releases of Python 3.12 begin no thread by now
        _thread.start_new_thread(_end_what_waits, (threading.main_thread().ident or 0,))


def _end_what_waits(main: int) -> None:
    def limit_s() -> float:
        for frame in _frames_of(main):
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _JOINS:
                return _JOINS_S
        # Functions that the script has left for its end may wait for others, and be right.
        return _WAITS_FOR_RANKS_S

    if _wait_until_it_waits(main, lambda: False, limit_s):
        leave(_STATUS[0])


def leave(status: int) -> None:
    """End this process now, with the child processes that it would wait for."""
    with suppress(Exception):
        children = [one for one in multiprocessing.active_children() if not one.daemon]
        for one in multiprocessing.active_children():
            one.terminate()
        deadline = monotonic() + _END_S
        while any(one.is_alive() for one in children) and monotonic() < deadline:
            sleep(_LOOK_S / 5)
        for one in children:
            one.kill()
    leave_now(status)
