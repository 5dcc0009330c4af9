"""Differences between torch's versions, from 2.1 to 2.14, where a recording touches them.

Each difference is here once, with the versions that it is for.
:mod:`recompute_scan.record.checkpoint_calls` tests whether checkpoints are caught at all.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch._utils
import torch.utils.checkpoint as torch_checkpoint
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import _disable_current_modes

from recompute_scan.frameworks.pytorch import GENERATORS
from recompute_scan.units import is_before

# Whether `torch.compile` traces the caller. Up to 2.2 it has another place; both are functions
# that the compiler knows by identity, so they are called as they are, through no wrapper.
is_compiling: Callable[[], bool] = getattr(
    torch.compiler, "is_compiling", torch._utils.is_compiling
)


def _frame_setter() -> Callable[[object], object]:
    setter = cast("Callable[[object], object]", eval_frame.set_eval_frame)
    try:
        setter(setter(None))
    except RuntimeError:  # torch cannot compile on this Python
        return lambda _: None
    return setter


# Sets what compiles the Python frames that this thread enters from here on; returns what did.
compile_frames_by = _frame_setter()


def run_uncompiled(function: Any) -> None:
    """Keep ``torch.compile`` from compiling calls of the function as such. Functions that
    it calls, and a compiled function that calls it, are compiled as ever.
    """
    with suppress(RuntimeError):  # as above
        if hasattr(eval_frame, "skip_code"):  # up to 2.6
            eval_frame.skip_code(function.__code__)
        else:
            action = eval_frame._FrameAction
            strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
            eval_frame.set_code_exec_strategy(function.__code__, strategy)


def import_ahead() -> None:
    """Import what torch's profiler and its modes import where they are first used: by then, an
    import hook of the script's may refuse it.
    """
    for name in ("torch.profiler.python_tracer", "torch.profiler._cupti_monitor"):
        with suppress(ImportError):  # not in every version
            importlib.import_module(name)
    with _disable_current_modes():
        pass


# The profiler's own lines on file descriptor 2. Kineto's: up to 2.3 one for each stage of a
# recording, since 2.13 one for each start and end, and in every build for CUDA one where there is
# no GPU. torch's: one of the first tensor on the CPU that is freed and was there before.
PROFILER_LINE = re.compile(
    rb"STAGE:|USDT:|ERROR:.{0,300}DeviceProperties\.cpp:\d+\] \w+GetDeviceCount |"
    rb"ERROR: External init callback must run in same thread|"
    rb"(\[rank\d+\]:)?\[?W\d+ .{0,80}CPUAllocator\.cpp:\d+\] Memory block of unknown size "
)

# Where the compiled part gives its record of collectives, newest first.
_FLIGHT_RECORDS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

_ABSENT = "recompute_scan: absent"

# Since 2.8; before, these are plain ``RuntimeError``.
_DEVICE_ERRORS: Any = getattr(torch, "AcceleratorError", ())


def generator_name() -> str | None:
    """The generator behind a non-reentrant checkpoint, by the name under which torch looks it up
    in ``torch.utils.checkpoint`` at each call; ``None`` where there is none.
    """
    return next((name for name in GENERATORS if hasattr(torch_checkpoint, name)), None)


def settings_by_name() -> bool:
    """Whether the generator gets its settings by keyword only: from 2.14 on."""
    return generator_name() == GENERATORS[0]


def inputs(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of the checkpointed function, among those that the generator got after it.

    Up to 2.13 the settings come before the function's own arguments, and come along here. From
    2.14 on there are a tuple and a dictionary of arguments, and settings by keyword only.
    """
    if settings_by_name():
        positional, named = args
        return (*positional, *named.values())
    return tuple(args)


def early_stop(argument: bool | None) -> bool:
    """Whether a non-reentrant checkpoint called now stops its recompute early.

    Args:
        argument: ``early_stop`` as the call has it, since 2.9; ``None`` where it has none.
    """
    # set_checkpoint_early_stop() goes before; until 2.8 it is always set.
    switch = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)
    chosen = argument if switch is None else switch
    return chosen is not False


def compiled_something() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", {})
    return bool(counters and counters.get("stats"))


def stacks_crash() -> bool:
    """Whether a profiler that records Python stacks ends the process: before 2.7.1, on Python 3.13.

    There a frame's locals are no dictionary any more, and torch took them for one
    (pytorch#148273).
    """
    return sys.version_info >= (3, 13) and is_before(torch.__version__, "2.7.1") is True


def is_device_error(error: BaseException) -> bool:
    """Whether torch raised it for the GPU, which reports failed work to the next call.

    Some work that was given to it before has failed; each later call fails likewise.
    """
    if isinstance(error, _DEVICE_ERRORS):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(("CUDA error:", "HIP error:"))


def holds(store: Any, key: str) -> bool:
    """Whether a store of a process group has this key; it never waits.

    Up to 2.3 no store can be asked that (``check``). A comparison that fails gives the value, or
    back what was expected where there is none.
    """
    if hasattr(store, "check"):
        return bool(store.check([key]))
    return bool(store.compare_set(key, _ABSENT, _ABSENT).decode(errors="replace") != _ABSENT)


def flight_recorders() -> tuple[Callable[[], Any], ...]:
    """Functions that dump the latest collectives as JSON: of all backends from 2.9, of NCCL 2.6."""
    if not torch.distributed.is_available():
        return ()
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - not in every build

    found = (getattr(c10d, name, None) for name in _FLIGHT_RECORDS)
    return tuple(dump for dump in found if dump is not None)
