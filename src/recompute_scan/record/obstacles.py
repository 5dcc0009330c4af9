"""Why a profiler may not run now, or not with Python stacks, in words for the person."""

from __future__ import annotations

import sys
import threading

import torch

from recompute_scan.record.compat import stacks_crash
from recompute_scan.record.ranges import still_open

OTHER_PROFILER = (
    "The script runs a torch profiler of its own, and torch runs one at a time: recording "
    "waited for it to end. For a complete recording, run the script without its profiler."
)


def no_profiler() -> str | None:
    """Why no profiler may start any more in this process; ``None`` where one may."""
    open_ranges = still_open()
    if not open_ranges:
        return None
    names = ", ".join(open_ranges[:3])
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
    if sys.getprofile() is not None or threading.getprofile() is not None:
        return (
            "the script has a profile function of its own (sys.setprofile, cProfile), which torch "
            "would take out"
        )
    if getattr(torch._C, "_len_torch_function_stack", lambda: 0)():
        return "the script has a TorchFunctionMode on, which would see torch look at gradients"
    return None
