"""How a checkpoint is called, as far as it bears on what its replay costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from recompute_scan.annotations import EARLY_STOP_OFF, SELECTIVE
from recompute_scan.record.switches import COMPOSABLE_MODULE


class Arguments:
    """Reads settings by name off the arguments of torch's non-reentrant generator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        self._places = {name: place for place, name in enumerate(names)}

    def options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """The options of one call.

        Args:
            args: Positional arguments, the checkpointed function first.
            kwargs: Keyword arguments.
        """
        found = []
        # torch 2.1 has the switch, 2.9 the argument; the switch goes before.
        switch = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)
        early_stop = self._value("early_stop", args, kwargs) if switch is None else switch
        if early_stop is False:
            found.append(EARLY_STOP_OFF)
        context_fn = self._value("context_fn", args, kwargs)
        home = getattr(context_fn, "__module__", None)
        # The composable checkpoint passes one of its own that selects nothing.
        if context_fn is not None and home not in (torch_checkpoint.__name__, COMPOSABLE_MODULE):
            found.append(SELECTIVE)
        return found

    def _value(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        place = self._places.get(name)
        if place is None:
            return None
        return args[place] if place < len(args) else kwargs.get(name)


def counts_runs(modules: Sequence[nn.Module]) -> bool:
    """Does a module in here keep running statistics, to which every replay adds?"""
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
