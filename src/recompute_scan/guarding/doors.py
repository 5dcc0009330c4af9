"""The functions through which a script's calls pass while the guard counts.

They are entered in every step of a whole training: what might fail is inside a ``try``, and where
it fails the script's call goes on as it would without us.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from recompute_scan.guarding.tallies import TalliedRegion, Tallies
from recompute_scan.record.caught import Variant
from recompute_scan.record.compat import (
    compile_frames_by,
    is_compiling,
    run_uncompiled,
    settings_by_name,
)

# Prepares the call of a region that is to be compared: from its function, where among the arguments
# the checkpointed function is, and the arguments, makes what to call with which arguments.
Sampled = Callable[
    [Callable[..., Any], TalliedRegion, int, tuple[Any, ...]],
    "tuple[Callable[..., Any], tuple[Any, ...]]",
]
Failed = Callable[[BaseException], None]


class _Inside(threading.local):
    """How many recomputes this thread is in."""

    depth = 0


_inside = _Inside()


def door(
    original: Callable[..., Any],
    tallies: Tallies,
    variant: Variant,
    failed: Failed,
    *,
    place: int = 0,
    runs_before: int = 0,
    may_keep: bool = False,
    sampled: Sampled | None = None,
) -> Callable[..., Any]:
    """A function to put in the place of one that takes a function to checkpoint.

    Args:
        original: That one.
        tallies: What counts its calls.
        variant: Which kind of checkpoint it is.
        failed: Gets what failed in us.
        place: Where among the positional arguments the checkpointed function is, as a rule.
        runs_before: How many runs of the checkpointed function are the forward's: 1 where the
            original runs it itself.
        may_keep: Whether what follows the checkpointed function, or ``preserve_rng_state``, says
            whether its random numbers are kept.
        sampled: What to call, and with what, where the region is to be compared.
    """
    known, found, inside = tallies.of(variant), tallies.found, _inside
    keeps_at = place + 1 if may_keep and not settings_by_name() else sys.maxsize

    # What is done here costs several times what it would in a loop of its own, because torch's code
    # ran meanwhile: hence one look by address, and no call that a known region can do without.
    def passing(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # first of all: a compiler that traces this stops here
            return original(*args, **kwargs)
        compiler = compile_frames_by(None)
        call, given, at = original, args, place
        try:
            region = known.get(id(args[at]))
            if region is None:
                at, region = found(variant, args, at)
            if region is not None:
                region.entered += 1
                if inside.depth:
                    region.nested += 1
                if len(args) > keeps_at:
                    region.keeps_random = args[keeps_at]
                elif may_keep:
                    region.keeps_random = kwargs.get("preserve_rng_state", True)
                given = (*args[:at], counted(args[at], region, runs_before), *args[at + 1 :])
                if region.sampling is not None and sampled is not None:
                    call, given = sampled(original, region, at, given)
        except Exception as error:
            call, given = original, args
            failed(error)
        finally:
            if compiler is not None:
                compile_frames_by(compiler)
        return call(*given, **kwargs)

    run_uncompiled(passing)
    passing.__name__ = getattr(original, "__name__", "passing")
    passing.__doc__ = getattr(original, "__doc__", None)
    return passing


def counted(
    function: Callable[..., Any], region: TalliedRegion, forwards: int
) -> Callable[..., Any]:
    """The checkpointed function, whose runs are counted."""
    runs, inside = -forwards, _inside

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs <= 0:
            return function(*args, **kwargs)
        region.recomputed += 1
        if runs > 1:
            region.again += 1
        inside.depth += 1
        try:
            return function(*args, **kwargs)
        finally:  # it may stop early, by an exception
            inside.depth -= 1

    return counting


# Once for all: what is kept from being compiled is the code, which every call's function shares.
run_uncompiled(counted(len, TalliedRegion("reentrant", None, "", ""), 0))
