"""The functions through which a script's calls pass while the guard counts.

They are entered in every step of a whole training, and hold nothing that can fail: what might is
called inside a ``try``, and where it fails the script's call goes on as it would without us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from recompute_scan.guarding.tallies import TalliedRegion
from recompute_scan.record.compat import compile_frames_by, is_compiling, run_uncompiled

# The region of a call, or `None` where nothing is to be counted.
Enter = Callable[[tuple[Any, ...], dict[str, Any]], "TalliedRegion | None"]
# Prepares the call of a region that is to be compared: its function and arguments.
Sampled = Callable[
    [Callable[..., Any], TalliedRegion, tuple[Any, ...], dict[str, Any]],
    "tuple[Callable[..., Any], tuple[Any, ...]]",
]
Failed = Callable[[BaseException], None]


class _Inside(threading.local):
    """How many recomputes this thread is in."""

    depth = 0


_inside = _Inside()


def door(
    original: Callable[..., Any],
    enter: Enter,
    failed: Failed,
    *,
    place: Callable[[tuple[Any, ...]], int] = lambda _: 0,
    runs_before: int = 0,
    sampled: Sampled | None = None,
) -> Callable[..., Any]:
    """A function to put in the place of one that takes a function to checkpoint.

    Args:
        original: That one.
        enter: Tells the region of a call.
        failed: Gets what failed in us.
        place: Where among the positional arguments the checkpointed function is.
        runs_before: How many runs of the checkpointed function are the forward's: 1 where the
            original runs it itself.
        sampled: What to call, and with what, where the region is to be compared.
    """

    def passing(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # first of all: a compiler that traces this stops here
            return original(*args, **kwargs)
        compiler = compile_frames_by(None)
        function = original
        try:
            region = enter(args, kwargs)
            if region is not None:
                if _inside.depth:
                    region.nested += 1
                at = place(args)
                counts = counted(args[at], region, runs_before)
                args = (*args[:at], counts, *args[at + 1 :])
                if region.sampling is not None and sampled is not None:
                    function, args = sampled(original, region, args, kwargs)
        except Exception as error:
            failed(error)
        finally:
            if compiler is not None:
                compile_frames_by(compiler)
        return function(*args, **kwargs)

    run_uncompiled(passing)
    passing.__name__ = getattr(original, "__name__", "passing")
    passing.__doc__ = getattr(original, "__doc__", None)
    return passing


def counted(
    function: Callable[..., Any], region: TalliedRegion, forwards: int
) -> Callable[..., Any]:
    """The checkpointed function, whose runs are counted."""
    runs = -forwards

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs <= 0:
            return function(*args, **kwargs)
        region.recomputed += 1
        if runs > 1:
            region.again += 1
        _inside.depth += 1
        try:
            return function(*args, **kwargs)
        finally:  # it may stop early, by an exception
            _inside.depth -= 1

    return counting


# Once for all: what is kept from being compiled is the code, which every call's function shares.
run_uncompiled(counted(len, TalliedRegion("reentrant", None, "", ""), 0))
