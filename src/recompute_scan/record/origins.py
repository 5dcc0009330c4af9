"""Who switched a checkpoint on.

``torch.utils.checkpoint.checkpoint`` itself stays what it is: ``torch.compile`` knows it by
identity and others have imported it by name. What it looks up when called is replaced instead:
attributes of ``CheckpointFunction`` for the reentrant variant and the generator that
:mod:`recompute_scan.record.torch_versions` names for the other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import CodeType, FrameType
from typing import Any, Literal

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from recompute_scan.annotations import (
    CHECK_OFF,
    COUNTS_RUNS,
    EARLY_STOP_OFF,
    RANDOM_STATE_LEFT,
    SELECTIVE,
)
from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.registry import recognise
from recompute_scan.record.attribution import (
    COMPOSABLE_MODULE,
    NOWHERE,
    WRAPPER_MODULE,
    CallSites,
    Switches,
    place_of,
    top_package,
)
from recompute_scan.record.configuration import variables
from recompute_scan.record.isolation import Patches
from recompute_scan.record.modules import (
    UNKNOWN,
    ModuleIndex,
    ModuleName,
    covered_modules,
    unwrapped,
)
from recompute_scan.record.torch_versions import early_stop, generator_name

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


_CHECKPOINT_MODULE = "torch.utils.checkpoint"
_SEQUENTIAL = "torch/utils/checkpoint.py:checkpoint_sequential"
_RECOMPUTING = ("backward", "recompute_fn")  # the reentrant and the non-reentrant variant
_ASKING = (WRAPPER_MODULE, COMPOSABLE_MODULE)  # torch's own code that asks for checkpoints


_Lines = MutableMapping[nn.Module, dict[tuple[CodeType, int], str]]


class Origin(Struct, frozen=True):
    """What is known of one checkpoint call; empty text where nothing is.

    ``function`` names what checkpoints, where it is no way that is known: an autograd function by
    its class, a library's code by ``module.function``.
    """

    module: ModuleName = UNKNOWN
    mechanism: str = ""
    site: str = ""
    options: tuple[str, ...] = ()
    function: str = ""


class Origins:
    """Reads the origin of a checkpoint call off the stack above it."""

    def __init__(self, sites: CallSites, switches: Switches, index: ModuleIndex) -> None:
        self._sites = sites
        self._switches = switches
        self._index = index
        self._lines: _Lines = WeakIdKeyDictionary()

    def of(
        self,
        function: object,
        args: Sequence[object],
        frame: FrameType | None,
        options: Sequence[str] = (),
        own: str = "",
    ) -> Origin:
        """The origin of the call whose innermost frame this is.

        Args:
            function: What is checkpointed.
            args: The arguments it is called with.
            frame: A frame inside the checkpoint function, or the composable one's hook.
            options: What the call's own arguments say.
            own: Class name of the autograd function that checkpoints, where it is not torch's.
        """
        found, covered = self._asked(function, args, frame, options, own)
        every = [*covered, *covered_modules(function, args, every=True)]
        counts = [COUNTS_RUNS] if counts_runs(every) else []
        return replace(found, options=(*options, *counts))

    def asker(
        self,
        function: object,
        args: Sequence[object],
        frame: FrameType | None,
        options: Sequence[str] = (),
    ) -> Origin:
        """Module, mechanism and site alone, as :meth:`of` has them: what the module is like is
        not looked at.
        """
        return self._asked(function, args, frame, options, "")[0]

    def _asked(
        self,
        function: object,
        args: Sequence[object],
        frame: FrameType | None,
        options: Sequence[str],
        own: str,
    ) -> tuple[Origin, list[nn.Module]]:
        covered = covered_modules(function, args)
        sequential, caller = _caller(frame)
        asking, switched, name = "", NOWHERE, ""
        if caller is not None:
            name = str(caller.f_globals.get("__name__") or "")
            asking = _SEQUENTIAL if sequential else place_of(caller)
            if name == WRAPPER_MODULE:
                wrapper = variables(caller).get("self")
                if isinstance(wrapper, nn.Module):
                    covered = [unwrapped(wrapper)]
                switched = self._switches.of_wrapper(wrapper)
            elif name == COMPOSABLE_MODULE:
                switched = self._switches.of_composable(function)
            elif covered:
                switched = self._switches.of_model_with(covered[0], asking)
        selective = SELECTIVE in options
        mechanism = recognise(asking, switched.places, selective=selective, own=bool(own))
        site = self._switches.of_settings(mechanism)
        if not site and (mechanism.switches or name in _ASKING):
            site = switched.site
        named = own if mechanism is pytorch.OWN else ""
        general = mechanism in (pytorch.DIRECT, pytorch.OWN)
        if general and caller is not None and not self._sites.is_users(caller):
            mechanism, named = pytorch.LIBRARY, f"{name}.{own or caller.f_code.co_name}"
        return (
            Origin(
                module=self._index.look_up(covered),
                mechanism=mechanism.name,
                site=site or self._line(caller, covered),
                function=named,
            ),
            covered,
        )

    def _line(self, caller: FrameType | None, covered: list[nn.Module]) -> str:
        """The user's line that led to the call; of a library's call the line of its first run,
        which a recompute does not show.
        """
        if caller is None or not covered or self._sites.is_users(caller):
            return self._sites.called_at(caller)
        known = self._lines.setdefault(covered[0], {})
        key = caller.f_code, caller.f_lineno
        if key not in known:
            known[key] = self._sites.called_at(caller)
        return known[key]


def _caller(frame: FrameType | None) -> tuple[bool, FrameType | None]:
    """Whether ``checkpoint_sequential`` made the call, and the frame that asked for it.

    ``None`` where that frame cannot be told: a recompute calls again what the forward pass called,
    and the frames beyond it are those of the backward pass.
    """
    sequential = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__") or "")
        if name == _CHECKPOINT_MODULE:
            if frame.f_code.co_name in _RECOMPUTING:
                return sequential, None
            sequential |= frame.f_code.co_name == "checkpoint_sequential"
        elif name in _ASKING or top_package(frame) not in ("torch", "recompute_scan"):
            return sequential, frame
        frame = frame.f_back
    return sequential, None
