"""Remembers where checkpointing was switched on, for the ways that are not a direct call.

torch's checkpoint wrapper, composable checkpoint and the libraries' enable methods are switched
on once and act later, in library code; others read a settings object that the script made. The
entry points are wrapped right after their module is imported; nothing is imported here for
their sake.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from recompute_scan.advise import fsdp, pytorch
from recompute_scan.advise.registry import MECHANISMS, recognise
from recompute_scan.record.call_sites import CallSites, places_of
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.imports import after_import
from recompute_scan.record.module_names import unwrapped
from recompute_scan.record.patches import Patches
from recompute_scan.run_info import SwitchedOn

WRAPPER_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
COMPOSABLE_MODULE = "torch.distributed._composable.checkpoint_activation"


@dataclass(frozen=True)
class Switched:
    """Where checkpointing was switched on; empty where that is not known.

    Attributes:
        site: The line, as shown to a person.
        places: ``path:function`` of the frames that led there, innermost first.
        asking: Where the checkpoint will be called from; a pattern of the mechanism's.
    """

    site: str = ""
    places: tuple[str, ...] = ()
    asking: str = ""


NOWHERE = Switched()
_ByModule = weakref.WeakKeyDictionary[nn.Module, Switched]


class Switches:
    """By module: each wrapper, each module with a composable checkpoint, each whole model."""

    def __init__(self, sites: CallSites, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._sites = sites
        self._wrappers: _ByModule = weakref.WeakKeyDictionary()
        self._composable: _ByModule = weakref.WeakKeyDictionary()
        self._models: _ByModule = weakref.WeakKeyDictionary()
        self._parts: _ByModule = weakref.WeakKeyDictionary()  # of models, once looked up
        self._settings: dict[str, str] = {}
        self._patches = Patches()
        self._active = False
        self.warnings: list[str] = []

    def install(self) -> None:
        """Watch the entry points, those of modules imported already too."""
        self._active = True
        self._after_import(WRAPPER_MODULE, self._watch_wrapper)
        self._after_import(COMPOSABLE_MODULE, self._watch_composable)
        # The last that has an entry point is the least specific.
        for entry, asking in {e: m.asks[0] for m in MECHANISMS for e in m.switches}.items():
            self._watch_method(entry, functools.partial(self._model_switched, asking))
        for entry in dict.fromkeys(e for m in MECHANISMS for e in m.settings):
            self._watch_method(entry, functools.partial(self._set, entry))

    def remove(self) -> None:
        """Remember nothing more. What was imported by name meanwhile passes calls through."""
        self._active = False
        self._patches.undo()

    def of_wrapper(self, wrapper: object) -> Switched:
        """Where this ``CheckpointWrapper`` was made."""
        return _get(self._wrappers, wrapper)

    def of_composable(self, module: object) -> Switched:
        """Where composable ``checkpoint`` was applied to this module."""
        return _get(self._composable, module)

    def of_model_with(self, module: object) -> Switched:
        """Where the enable method of the model that holds this module was called."""
        if not isinstance(module, nn.Module) or not self._models:
            return NOWHERE
        switched = self._parts.get(module)
        if switched is None:
            holding = (
                switched
                for model, switched in self._models.items()
                if any(unwrapped(part) is module for part in model.modules())
            )
            switched = self._parts[module] = next(holding, NOWHERE)
        return switched

    def of_settings(self, entries: tuple[str, ...]) -> str:
        """The line that last made one of these settings objects; empty where none did."""
        return next((self._settings[entry] for entry in entries if entry in self._settings), "")

    def still_on(self) -> tuple[SwitchedOn, ...]:
        """What was switched on and is not off again, each switch once."""
        on = [
            *self._wrappers.values(),
            *self._composable.values(),
            *(switched for model, switched in self._models.items() if _is_on(model)),
        ]
        found = {}
        for switched in on:
            mechanism = recognise(switched.asking, switched.places)
            site = self.of_settings(mechanism.settings) or switched.site
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
            self._remember(self._wrappers, wrapper, fsdp.MECHANISM.asks[0])

        self._patches.replace(kind, "__init__", self._guard.around(original, init))

    def _watch_composable(self, module: ModuleType) -> None:
        original = module.checkpoint

        def ours(call: Call, target: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(target, *args, **kwargs)
            self._remember(self._composable, target, pytorch.COMPOSABLE.asks[0])
            return result

        checkpoint = self._guard.around(original, ours)  # with `.state`, which its hooks look up
        self._patches.replace(module, "checkpoint", checkpoint)
        parent = sys.modules.get(module.__name__.rpartition(".")[0])
        if parent is not None and getattr(parent, "checkpoint", None) is original:
            self._patches.replace(parent, "checkpoint", checkpoint)

    def _watch_method(self, entry: str, called: Callable[[object], None]) -> None:
        name, _, path = entry.partition(":")
        class_name, _, method = path.partition(".")

        def watch(module: ModuleType) -> None:
            kind = getattr(module, class_name)
            original = vars(kind).get(method)
            if original is None:  # under another name in this version
                return

            def watched(call: Call, target: Any, *args: Any, **kwargs: Any) -> Any:
                called(target)
                return call(target, *args, **kwargs)

            self._patches.replace(kind, method, self._guard.around(original, watched))

        self._after_import(name, watch)

    def _model_switched(self, asking: str, model: object) -> None:
        if isinstance(model, nn.Module):
            self._remember(self._models, model, asking)
            self._parts.clear()

    def _set(self, entry: str, _: object) -> None:
        if self._active:
            self._settings[entry] = self._sites.switched_on_at(sys._getframe(2))

    def _remember(self, where: _ByModule, module: object, asking: str) -> None:
        if self._active and isinstance(module, nn.Module):
            frame = sys._getframe(1)
            site = self._sites.switched_on_at(frame)
            where[module] = Switched(site, tuple(places_of(frame)), asking)


def _is_on(model: nn.Module) -> bool:
    """Does a part of the model have its flag set? transformers and diffusers name it alike."""
    return any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules())


def _get(known: Mapping[nn.Module, Switched], module: object) -> Switched:
    return known.get(module, NOWHERE) if isinstance(module, nn.Module) else NOWHERE
