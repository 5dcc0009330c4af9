"""Remembers where checkpointing was switched on, for the ways that are not a direct call.

torch's checkpoint wrapper, composable checkpoint and the libraries' enable methods are switched
on once and act later, in library code; others read a settings object that the script made. The
entry points are wrapped right after their module is imported; nothing is imported here for
their sake.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from msgspec import Struct
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from recompute_scan.fidelity.module_tree import named_parts
from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.known import MECHANISMS, matches, recognise
from recompute_scan.frameworks.mechanism import Mechanism
from recompute_scan.record.call_sites import CallSites, places_of
from recompute_scan.record.given import Made
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.module_names import unwrapped
from recompute_scan.record.patches import Patches, after_import
from recompute_scan.run_info import SwitchedOn

WRAPPER_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
COMPOSABLE_MODULE = "torch.distributed._composable.checkpoint_activation"


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
# What the libraries call the flag by which a model knows that it checkpoints.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


class Switches:
    """By module: each wrapper, each module with a composable checkpoint, each whole model."""

    def __init__(self, sites: CallSites, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
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
        """Watch the entry points, those of modules imported already too."""
        self._active = True
        self._after_import(WRAPPER_MODULE, self._watch_wrapper)
        self._after_import(COMPOSABLE_MODULE, self._watch_composable)
        # The last that has an entry point is the least specific.
        for entry, asks in {e: m.asks for m in MECHANISMS for e in m.switches}.items():
            self._watch_entry(entry, functools.partial(self._model_switched, asks))
        for entry in dict.fromkeys(e for m in MECHANISMS for e in m.settings):
            self._watch_entry(entry, functools.partial(self._set, entry))

    def remove(self) -> None:
        """Remember nothing more. What was imported by name meanwhile passes calls through."""
        self._active = False
        self._patches.undo()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is switched on in the body is not remembered."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    def of_wrapper(self, wrapper: object) -> Switched:
        """Where this ``CheckpointWrapper`` was made."""
        return _get(self._wrappers, wrapper)

    def of_composable(self, module: object) -> Switched:
        """Where composable ``checkpoint`` was applied to this module."""
        return _get(self._composable, module)

    def of_model_with(self, module: object, asking: str) -> Switched:
        """Where the model that holds this module was told to checkpoint, by the way that calls the
        checkpoint from this place.
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
        entry = next((entry for entry in mechanism.settings if entry in self._settings), None)
        if entry is None:
            return ""
        made = self._settings[entry]
        if (mechanism.name, made) not in self._given:
            self._given[mechanism.name, made] = self._sites.given_at(made, mechanism)
        return self._given[mechanism.name, made]

    def still_on(self) -> tuple[SwitchedOn, ...]:
        """What was switched on and is not off again, each switch once."""
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
                    f"Call sites of {module.__name__} are not known in this version: {error}"
                )

        self._patches.add(after_import(name, self._guard.aside(hook)))

    def _watch_wrapper(self, module: ModuleType) -> None:
        kind = module.CheckpointWrapper
        original = kind.__init__

        def init(call: Call, wrapper: Any, *args: Any, **kwargs: Any) -> None:
            call(wrapper, *args, **kwargs)
            self._remember(self._wrappers, wrapper, pytorch.WRAPPER.asks)

        self._patches.replace(kind, "__init__", self._guard.around(original, init))

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
        """Watch ``module:Class.method``, ``module:function``, or ``package:*.method``: that of each
        class in the package's modules.
        """
        name, _, path = entry.partition(":")
        owner, _, function = path.rpartition(".")

        def watch(module: ModuleType) -> None:
            if not owner:
                owners: list[Any] = [module]
            elif owner == "*":
                owners = _classes_below(module)
            else:
                owners = [getattr(module, owner)]
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

    def _model_switched(self, asks: tuple[str, ...], model: object) -> None:
        self._remember(self._models, model, asks)

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
