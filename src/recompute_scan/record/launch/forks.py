"""What is done in processes that the script forks, so that they do what they would without us."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import suppress


def in_forked_processes(function: Callable[[], object]) -> None:
    """Call a function in every process that is forked from this one, now and later.

    It cannot be taken back, so it is to be a module's function that may find nothing to do.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


@functools.cache
def let_forked_processes_end() -> None:
    """To be called before the first profiler starts.

    Kineto then has a thread that waits for ever. In a forked process that thread is not there, and
    the destructor of what it waits for (``ConfigLoader``) waits for it at the process's end, behind
    all that Python does there. So such a process ends before the destructors of libraries.
    """
    libc = ctypes.CDLL(None)
    if all(hasattr(libc, name) for name in ("on_exit", "_exit", "fcloseall")):  # glibc's
        in_forked_processes(
            functools.partial(_leave_early, libc.on_exit, libc._exit, libc.fcloseall)
        )


def _leave_early(on_exit: Callable[..., object], leave: object, flush: object) -> None:
    with suppress(Exception):
        # What is registered last is called first; the exit status is given to each.
        on_exit(leave, None)
        on_exit(flush, None)
