"""How a checkpoint is called, as far as it bears on what its recompute costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from recompute_scan.annotations import (
    CHECK_OFF,
    EARLY_STOP_OFF,
    RANDOM_STATE_LEFT,
    SELECTIVE,
)
from recompute_scan.record.compat import early_stop
from recompute_scan.record.switches import COMPOSABLE_MODULE


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
    return any(
        part.training and _has_running_statistics(part)
        for module in modules
        for part in module.modules()
    )


def _has_running_statistics(module: nn.Module) -> bool:
    name = "track_running_stats"
    if isinstance(module, torch.jit.ScriptModule):  # keeps its attributes out of Python's reach
        return bool(getattr(module, name, False))
    # Asking a module for what it lacks makes it look through three dictionaries, and raise.
    return bool(vars(module).get(name))
