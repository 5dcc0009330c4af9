"""Whether the checkpoints of this torch are caught, seen before the script runs.

What is replaced in torch are private names. A version that keeps such a name and calls another
would leave its checkpoints without annotations, and annotations that are missing tell a false
story: of switches that do nothing, and of recompute that nobody asked for. Where a kind is not
caught nothing is marked at all, and the trace is read as any other is.

So torch is asked for one checkpoint of each kind, which ends where ours would begin: no operator
runs, no random number is drawn, no thread is started, and no device is looked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from recompute_scan.record.caught import generator_function, reentrant_function, replace_generator
from recompute_scan.record.compat import inputs
from recompute_scan.record.patches import Patches, after_import
from recompute_scan.record.probe import Probe
from recompute_scan.record.switches import WRAPPER_MODULE

Checkpoint = Callable[[object], Any]


class _Caught(BaseException):
    """The checkpoint has come to where it is caught."""


def install(probe: Probe) -> None:
    """Install the probe if this torch's checkpoints are caught; else say so in its warnings.

    FSDP's wrapper is tried once the script has imported it.
    """

    def wrapper_imported(module: ModuleType) -> None:
        with probe.aside():
            missed = uncaught(_wrappers(module))
        if missed:
            _leave_out(probe, missed)

    if missed := uncaught(_direct()):
        _leave_out(probe, missed)
        return
    probe.install()
    probe.at_removal(after_import(WRAPPER_MODULE, wrapper_imported))


def uncaught(kinds: dict[str, Checkpoint]) -> tuple[str, ...]:
    """Which of these kinds of checkpoint do not come to where they are caught.

    None, where a profiler of the script's runs: it would see the attempt.

    Args:
        kinds: By name, what calls a checkpoint with the argument that it gets.
    """
    recording = getattr(torch._C._autograd, "_profiler_enabled", None)
    if recording is not None and recording():
        return ()
    return tuple(name for name, checkpoint in kinds.items() if not _is_caught(checkpoint))


def _is_caught(checkpoint: Checkpoint) -> bool:
    ours = object()
    patches = Patches()
    try:
        _wait_for(ours, patches)
        checkpoint(ours)
    except _Caught:
        return True
    except Exception:  # what it wants is not what it is given here, nor what the hooks expect
        return False
    finally:
        patches.undo()
    return False


def _wait_for(ours: object, patches: Patches) -> None:
    """Stop the checkpoint that has this argument; those of other threads pass."""
    function, generator = reentrant_function(), generator_function()
    forward = getattr(function, "forward", None)
    if forward is not None:

        @functools.wraps(forward)
        def watched_forward(ctx: Any, *args: Any) -> Any:
            if any(arg is ours for arg in args) and any(map(callable, args)):
                raise _Caught
            return forward(ctx, *args)

        patches.replace(function, "forward", staticmethod(watched_forward))
    if generator is not None:

        @functools.wraps(generator)
        def watched_generator(function: Any, *args: Any, **kwargs: Any) -> Any:
            if any(arg is ours for arg in inputs(args)) and callable(function):
                raise _Caught
            return generator(function, *args, **kwargs)

        replace_generator(watched_generator, patches)


def _leave_out(probe: Probe, missed: tuple[str, ...]) -> None:
    probe.leave_out(
        f"In this version of torch ({torch.__version__}) checkpoints of this kind cannot be seen "
        f"when they are called: {', '.join(missed)}. So none bears an annotation: what runs again "
        "is read off the operators, and the call sites are not known."
    )


def _direct() -> dict[str, Checkpoint]:
    function = _without_compiler(torch_checkpoint.checkpoint)
    return {
        "reentrant": lambda x: function(_nothing, x, use_reentrant=True),
        "non-reentrant": lambda x: function(_nothing, x, use_reentrant=False),
    }


def _wrappers(module: ModuleType) -> dict[str, Checkpoint]:
    return {
        f"FSDP's checkpoint_wrapper, {one.name}": functools.partial(_wrapped, module, one)
        for one in module.CheckpointImpl
    }


def _wrapped(module: ModuleType, implementation: object, x: object) -> None:
    # The class: the function warns of the reentrant kind in 2.6, and the script did not ask.
    wrapper = module.CheckpointWrapper(nn.Identity(), implementation)
    asked = wrapper.checkpoint_fn
    if not str(_without_compiler(asked.func).__module__).startswith("torch."):
        raise _Caught  # the script's own is in torch's place, and is not ours to call
    wrapper.checkpoint_fn = functools.partial(
        _without_compiler(asked.func), *asked.args, **asked.keywords
    )
    wrapper.forward(x)  # a call would run the hooks that the script has for all modules


def _nothing(x: object) -> object:
    return x


def _without_compiler(function: Any) -> Any:
    """The function below the decorator that imports the compiler in order to keep it out."""
    return inspect.unwrap(function)
