"""The code that switched a checkpoint on, and its line.

``torch.utils.checkpoint.checkpoint`` itself is not replaced: ``torch.compile`` knows it by
identity, and other modules have imported it by name. Replaced are the names that it looks up when
it is called: attributes of ``CheckpointFunction`` for the reentrant variant, and the generator that
:mod:`recompute_scan.record.torch_versions` names for the other.

torch's checkpoint wrapper, composable checkpoint and the libraries' enable methods are called once
and act later, in library code; others read a settings object that the script made. Each of these
entry points is wrapped right after the script has imported its module.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from types import CodeType, FrameType, ModuleType
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
from recompute_scan.fidelity.lost_gradients import Application
from recompute_scan.fidelity.state import named_parts
from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import Mechanism
from recompute_scan.frameworks.registry import MECHANISMS, matches, recognise
from recompute_scan.record.attribution import (
    CallSites,
    Made,
    place_of,
    places_of,
    variables,
)
from recompute_scan.record.isolation import Call, Guard, Patches, after_import
from recompute_scan.record.modules import (
    UNKNOWN,
    ModuleIndex,
    ModuleName,
    covered_modules,
    unwrapped,
)
from recompute_scan.record.torch_versions import early_stop, generator_name
from recompute_scan.result.run_record import SwitchedOn

WRAPPER_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
COMPOSABLE_MODULE = "torch.distributed._composable.checkpoint_activation"
# The module that runs a checkpoint of a compiled graph. All options but a policy are its choice.
COMPILER_MODULE = "torch._higher_order_ops.wrap"
# Where older ones run it with; a person may as well.
_INTERPRETER_MODULE = "torch.fx.interpreter"


class Switched(Struct, frozen=True):
    """Where checkpointing was switched on; empty where that is not known.

    Attributes:
        site: The line, as shown to a person.
        places: ``path:function`` of the frames that led there, innermost first.
        asks: Where the checkpoint will be called from; patterns of the mechanism's.
    """

    site: str = ""
    places: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()


NOWHERE = Switched()
_ByModule = MutableMapping[nn.Module, Switched]
_ByPart = MutableMapping[nn.Module, dict[str, Switched]]
# The libraries' names of the flag that turns a model's checkpoints on.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


class Switches:
    """By module: each wrapper, each module with a composable checkpoint, each whole model."""

    def __init__(self, sites: CallSites, guard: Guard) -> None:
        self._guard = guard
        self._sites = sites
        self._wrappers: _ByModule = WeakIdKeyDictionary()
        self._composable: _ByModule = WeakIdKeyDictionary()
        self._models: _ByModule = WeakIdKeyDictionary()
        self._parts: _ByPart = WeakIdKeyDictionary()  # of models, once looked up
        self._settings: dict[str, Made] = {}
        self._given: dict[tuple[str, Made], str] = {}
        self._patches = Patches()
        self._active = False
        self.warnings: list[str] = []

    def install(self) -> None:
        """Watch the entry points, also in modules that are imported already."""
        self._active = True
        self._after_import(WRAPPER_MODULE, self._watch_wrapper)
        self._after_import(COMPOSABLE_MODULE, self._watch_composable)
        # The last that has an entry point is the least specific.
        for entry, asks in {e: m.asks for m in MECHANISMS for e in m.switches}.items():
            remember = functools.partial(self._remember, self._models, asks=asks)
            self._watch_entry(entry, remember)
        for entry in dict.fromkeys(e for m in MECHANISMS for e in m.configured_by):
            self._watch_entry(entry, functools.partial(self._set, entry))

    def remove(self) -> None:
        """Remember nothing more. Functions that were imported by name pass calls through."""
        self._active = False
        self._patches.undo()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the body without remembering what it switches on."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    def of_wrapper(self, wrapper: object) -> Switched:
        return _get(self._wrappers, wrapper)

    def of_composable(self, module: object) -> Switched:
        return _get(self._composable, module)

    def of_model_with(self, module: object, asking: str) -> Switched:
        """Where checkpoints were switched on for the model that holds this module, by the way that
        calls the checkpoint from this place.
        """
        if not isinstance(module, nn.Module) or not self._models:
            return NOWHERE
        known = self._parts.setdefault(module, {})
        if asking not in known:
            holding = (
                switched
                for model, switched in self._models.items()
                if matches(switched.asks, (asking,))
                and any(unwrapped(part) is module for _, part in named_parts(model))
            )
            known[asking] = next(holding, NOWHERE)
        return known[asking]

    def of_settings(self, mechanism: Mechanism) -> str:
        """Where the mechanism's setting was last given; empty where nothing holds it."""
        made = next(filter(None, map(self._settings.get, mechanism.configured_by)), None)
        if made is None:
            return ""
        if (mechanism.name, made) not in self._given:
            self._given[mechanism.name, made] = self._sites.given_at(made, mechanism)
        return self._given[mechanism.name, made]

    def still_on(self) -> tuple[SwitchedOn, ...]:
        """The switches that are on and not off again, each once."""
        on = [
            *self._wrappers.values(),
            *self._composable.values(),
            *(switched for model, switched in self._models.items() if _is_on(model)),
        ]
        found = {}
        for switched in on:
            mechanism = recognise(switched.asks[0], switched.places)
            site = self.of_settings(mechanism) or switched.site
            found[mechanism.name, site] = SwitchedOn(mechanism.name, site)
        return tuple(found.values())

    def _after_import(self, name: str, watch: Callable[[ModuleType], None]) -> None:
        def hook(module: ModuleType) -> None:
            try:
                watch(module)
            except Exception as error:  # an import of the user's must not fail because of us
                self.warnings.append(
                    f"Calls to this version of {module.__name__} cannot be located: {error}"
                )

        self._patches.add(after_import(name, self._guard.aside(hook)))

    def _watch_wrapper(self, module: ModuleType) -> None:
        def init(call: Call, wrapper: Any, *args: Any, **kwargs: Any) -> None:
            call(wrapper, *args, **kwargs)
            self._remember(self._wrappers, wrapper, pytorch.WRAPPER.asks)

        self._patches.wrap(self._guard, module.CheckpointWrapper, "__init__", init)

    def _watch_composable(self, module: ModuleType) -> None:
        original = module.checkpoint

        def ours(call: Call, target: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(target, *args, **kwargs)
            self._remember(self._composable, target, pytorch.COMPOSABLE.asks)
            return result

        checkpoint = self._guard.around(original, ours)  # with `.state`, which its hooks look up
        self._patches.replace(module, "checkpoint", checkpoint)
        parent = sys.modules.get(module.__name__.rpartition(".")[0])
        if parent is not None and getattr(parent, "checkpoint", None) is original:
            self._patches.replace(parent, "checkpoint", checkpoint)

    def _watch_entry(self, entry: str, called: Callable[[object], None]) -> None:
        """Watch ``module:Class.method``, ``module:function``, or ``package:*.method``, the method
        of each class in the package's modules.
        """
        name, _, path = entry.partition(":")
        owner, _, function = path.rpartition(".")

        def watch(module: ModuleType) -> None:
            if owner == "*":
                owners: list[Any] = _classes_below(module)
            else:
                owners = [getattr(module, owner) if owner else module]
            for one in owners:
                self._watch_function(one, function, called)

        self._after_import(name, watch)

    def _watch_function(self, owner: Any, name: str, called: Callable[[object], None]) -> None:
        original = vars(owner).get(name)
        if original is None:  # under another name in this version
            return

        def watched(call: Call, *args: Any, **kwargs: Any) -> Any:
            with self._guard.part("A call site is not known"):
                called(next(iter((*args, *kwargs.values())), None))
            return call(*args, **kwargs)

        self._patches.replace(owner, name, self._guard.around(original, watched))

    def _set(self, entry: str, holder: object) -> None:
        if self._active:
            site = self._sites.switched_on_at(sys._getframe(3))
            self._settings[entry] = Made(site, type(holder))

    def _remember(self, where: _ByModule, module: object, asks: tuple[str, ...]) -> None:
        if self._active and isinstance(module, nn.Module):
            frame = sys._getframe(1)
            where[module] = Switched(
                self._sites.switched_on_at(frame), tuple(places_of(frame)), asks
            )
            self._parts.clear()


def _classes_below(package: ModuleType) -> list[type]:
    """The classes that the package's imported modules define."""
    inside = f"{package.__name__}."
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(inside)]
    return [
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


def _is_on(model: nn.Module) -> bool:
    """Does a part of the model have its flag set, or was the model itself wrapped?"""
    flags = [getattr(part, flag, None) for _, part in named_parts(model) for flag in _FLAGS]
    return True in flags or not any(flag is False for flag in flags)


def _get(known: Mapping[nn.Module, Switched], module: object) -> Switched:
    return known.get(module, NOWHERE) if isinstance(module, nn.Module) else NOWHERE


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


def catch_others(
    function: Callable[[Any], None],
    other: Callable[[ModuleType, str], None],
    patches: Patches,
    guard: Guard,
) -> None:
    """Find the libraries' checkpoint functions, once their modules are imported.

    ``function`` gets one that is an autograd function of the reentrant kind, ``other`` the module
    and the name of any other.
    """

    def imported(name: str, module: ModuleType) -> None:
        found = getattr(module, name, None)
        if getattr(found, "forward", None) is not None:
            function(found)
        elif callable(found):
            other(module, name)

    for entry in dict.fromkeys(e for m in MECHANISMS for e in m.watched):
        module, _, name = entry.partition(":")
        hook = guard.aside(functools.partial(imported, name))
        patches.add(after_import(module, hook))


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
        """The options that the script gave one call; the checkpointed function is its first
        argument.
        """
        runs = getattr(args[0], "__module__", None)
        compiled = runs == COMPILER_MODULE or (
            runs == _INTERPRETER_MODULE
            and any(
                one.f_globals.get("__name__") == COMPILER_MODULE
                for one, _ in walk_stack(sys._getframe())
            )
        )
        found = []
        if not compiled and not early_stop(self._value("early_stop", args, kwargs)):
            found.append(EARLY_STOP_OFF)
        context_fn = self._value("context_fn", args, kwargs)
        home = getattr(context_fn, "__module__", None)
        if home == COMPILER_MODULE:  # around what the script gave, or around its own
            context_fn = inspect.getclosurevars(context_fn).nonlocals.get("context_fn")
            home = getattr(next(iter(getattr(context_fn, "args", ())), None), "__module__", None)
        # The composable checkpoint and the compiler pass functions that select nothing.
        selects_nothing = (torch_checkpoint.__name__, COMPOSABLE_MODULE, COMPILER_MODULE)
        if context_fn is not None and home not in selects_nothing:
            found.append(SELECTIVE)
        if compiled:
            return found
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
_SEQUENTIAL = pytorch.SEQUENTIAL.asks[0]
_RECOMPUTING = ("backward", "recompute_fn")  # the reentrant and the non-reentrant variant
# torch's own code that asks for checkpoints, and ours that does so for good.
_ASKING = (WRAPPER_MODULE, COMPOSABLE_MODULE, "recompute_scan.fitting.layer_switch")
_OF_FX = "<eval_with_key>"  # the file of code that torch.fx writes


_Lines = MutableMapping[nn.Module, dict[tuple[CodeType, int], str]]


class Origin(Struct, frozen=True):
    """The origin of one checkpoint call; empty text where it is not known.

    ``function`` names what checkpoints, where it is no way that is known: an autograd function by
    its class, a library's code by ``module.function``.
    """

    module: ModuleName = UNKNOWN
    mechanism: str = ""
    site: str = ""
    options: tuple[str, ...] = ()
    function: str = ""


class CheckpointCall(Struct, frozen=True):
    """One call of a checkpoint, as far as its wrapper knows it.

    Attributes:
        variant: Which kind of checkpoint it is.
        function: The checkpointed function.
        args: What that is called with.
        frame: A frame inside the checkpoint function, or the composable one's hook.
        options: How the checkpoint is set.
        own: Name of the autograd function where it is not torch's; else empty.
        library: Name of a library's function that is no autograd function; else empty.
        application: The call of the autograd function, where it is not torch's.
        differentiated: Whether a backward pass can go through it.
    """

    variant: Variant
    function: object
    args: tuple[object, ...]
    frame: FrameType | None
    options: Sequence[str] = ()
    own: str = ""
    library: str = ""
    application: Application | None = None
    differentiated: bool = True


class Origins:
    """Reads the origin of a checkpoint call off the stack above it."""

    def __init__(self, sites: CallSites, switches: Switches, index: ModuleIndex) -> None:
        self._sites = sites
        self._switches = switches
        self._index = index
        self._lines: _Lines = WeakIdKeyDictionary()

    def of(self, call: CheckpointCall) -> Origin:
        """The origin of a call, with its options."""
        found, covered = self._asked(call)
        every = [*covered, *covered_modules(call.function, call.args, every=True)]
        counts = [COUNTS_RUNS] if counts_runs(every) else []
        return replace(found, options=(*call.options, *counts))

    def asker(self, call: CheckpointCall) -> Origin:
        """Module, mechanism and site alone: what the module is like is not looked at."""
        return self._asked(call)[0]

    def _asked(self, call: CheckpointCall) -> tuple[Origin, list[nn.Module]]:
        function, own = call.function, call.own
        covered = covered_modules(function, call.args)
        sequential, caller = _caller(call.frame)
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
        selective = SELECTIVE in call.options
        mechanism = recognise(asking, switched.places, selective=selective, own=bool(own))
        site = self._switches.of_settings(mechanism)
        if not site and (mechanism.switches or name in _ASKING):
            site = switched.site
        named = own if mechanism is pytorch.OWN else ""
        general = mechanism in (pytorch.DIRECT, pytorch.OWN)
        if general and caller is not None and not self._sites.is_users(caller):
            mechanism, named = pytorch.LIBRARY, f"{name}.{own or caller.f_code.co_name}"
        site = site or self._line(self._giver(caller, function) if own else caller, covered)
        module = self._index.look_up(covered)
        return Origin(module=module, mechanism=mechanism.name, site=site, function=named), covered

    def _giver(self, frame: FrameType | None, function: object) -> FrameType | None:
        """The user's frame that chose what to checkpoint: no helper that was handed the function.

        Projects with a custom autograd function call it from one helper for every block
        (guided-diffusion); no reader wants to change that helper's line.
        """
        while frame is not None and frame.f_back is not None:
            code, held = frame.f_code, variables(frame)
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            handed = any(held.get(name) is function for name in given)
            if not handed or not all(map(self._sites.is_users, (frame, frame.f_back))):
                break
            frame = frame.f_back
        return frame

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

    ``None`` where that frame is not known: a recompute repeats calls of the forward pass, and
    the frames beyond it belong to the backward pass.
    """
    sequential = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__") or "")
        if name == _CHECKPOINT_MODULE:
            if frame.f_code.co_name in _RECOMPUTING:
                return sequential, None
            sequential |= frame.f_code.co_name == "checkpoint_sequential"
        elif name in _ASKING or (
            name.partition(".")[0] not in ("torch", "recompute_scan")
            and not frame.f_code.co_filename.startswith(_OF_FX)
        ):
            return sequential, frame
        frame = frame.f_back
    return sequential, None
