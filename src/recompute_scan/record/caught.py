"""torch's two kinds of checkpoint: where they can be caught, and how a call of one is made.

``torch.utils.checkpoint.checkpoint`` itself stays what it is: ``torch.compile`` knows it by
identity and others have imported it by name. What it looks up when called is replaced instead:
attributes of ``CheckpointFunction`` for the reentrant variant and the generator that
:mod:`recompute_scan.record.compat` names for the other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from recompute_scan.annotations import CHECK_OFF, EARLY_STOP_OFF, RANDOM_STATE_LEFT, SELECTIVE
from recompute_scan.record.compat import early_stop, generator_name
from recompute_scan.record.patches import Patches
from recompute_scan.record.switches import COMPOSABLE_MODULE

Variant = Literal["reentrant", "non-reentrant"]


def reentrant_function() -> Any:
    """Torch's autograd function of the reentrant variant; ``None`` where there is none."""
    return getattr(torch_checkpoint, "CheckpointFunction", None)


def generator_function() -> Any:
    """Torch's generator of the non-reentrant variant; ``None`` where there is none.

    It yields once, and the checkpointed function runs while it waits there.
    """
    name = generator_name()
    return None if name is None else getattr(torch_checkpoint, name)


def replace_generator(replacement: Callable[..., Any], patches: Patches) -> None:
    """Put another function in the place of :func:`generator_function`, wherever it is named."""
    name, original = generator_name(), generator_function()
    if name is None:
        return
    # The composable checkpoint imports the generator by name.
    for module in (torch_checkpoint, sys.modules.get(COMPOSABLE_MODULE)):
        if module is not None and getattr(module, name, None) is original:
            patches.replace(module, name, replacement)

    def restore() -> None:
        # Imported while the replacement was there, it has that by name.
        late = sys.modules.get(COMPOSABLE_MODULE)
        if late is not None and getattr(late, name, None) is replacement:
            setattr(late, name, original)

    patches.add(restore)


class Arguments:
    """Reads settings by name off the arguments of torch's non-reentrant generator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        self._places = {
            parameter.name: place
            for place, parameter in enumerate(parameters)
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        }
        self._names = {parameter.name for parameter in parameters}

    def options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """The options of one call.

        Args:
            args: Positional arguments, the checkpointed function first.
            kwargs: Keyword arguments.
        """
        found = []
        if not early_stop(self._value("early_stop", args, kwargs)):
            found.append(EARLY_STOP_OFF)
        context_fn = self._value("context_fn", args, kwargs)
        home = getattr(context_fn, "__module__", None)
        # The composable checkpoint passes one of its own that selects nothing.
        if context_fn is not None and home not in (torch_checkpoint.__name__, COMPOSABLE_MODULE):
            found.append(SELECTIVE)
        if self._value("determinism_check", args, kwargs) == "none":
            found.append(CHECK_OFF)
        if self._value("preserve_rng_state", args, kwargs) is False:
            found.append(RANDOM_STATE_LEFT)
        return found

    def _value(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name not in self._names:  # in `kwargs` it would be one of the user's
            return None
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)


def counts_runs(modules: Sequence[nn.Module]) -> bool:
    """Does a module in here keep running statistics, to which every recompute adds?"""
    # As `modules()` of each, which asks all of them for their names.
    waiting, met = list(modules), set()
    while waiting:
        part = waiting.pop()
        if id(part) in met:
            continue
        met.add(id(part))
        if part.training and _has_running_statistics(part):
            return True
        waiting += [one for one in part._modules.values() if one is not None]
    return False


def _has_running_statistics(module: nn.Module) -> bool:
    name = "track_running_stats"
    if isinstance(module, torch.jit.ScriptModule):  # keeps its attributes out of Python's reach
        return bool(getattr(module, name, False))
    # Asking a module for what it lacks makes it look through three dictionaries, and raise.
    return bool(vars(module).get(name))
