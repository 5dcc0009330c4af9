"""Remembers where checkpointing was switched on, for the ways that are not a direct call.

torch's checkpoint wrapper, composable checkpoint and transformers' enable methods are switched
on once and act later, in library code. Their entry points are wrapped right after their module
is imported; nothing is imported here for their sake.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt
from torch import nn

from recompute_scan.record.call_sites import CallSites
from recompute_scan.record.module_names import unwrapped

WRAPPER_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
COMPOSABLE_MODULE = "torch.distributed._composable.checkpoint_activation"
_TRANSFORMERS_MODULE = "transformers.modeling_utils"
_ENABLE_METHODS = ("gradient_checkpointing_enable", "activation_checkpointing_enable")

_Sites = weakref.WeakKeyDictionary[nn.Module, str]


class Switches:
    """Sites by module: each wrapper's own, a composable checkpoint's module, a whole HF model."""

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._wrappers: _Sites = weakref.WeakKeyDictionary()
        self._composable: _Sites = weakref.WeakKeyDictionary()
        self._models: _Sites = weakref.WeakKeyDictionary()
        self._model_sites: _Sites = weakref.WeakKeyDictionary()  # of layers, once looked up
        self._active = False
        self.warnings: list[str] = []

    def install(self) -> None:
        """Watch the entry points, those of modules imported already too."""
        self._active = True
        for name, watch in (
            (WRAPPER_MODULE, self._watch_wrapper),
            (COMPOSABLE_MODULE, self._watch_composable),
            (_TRANSFORMERS_MODULE, self._watch_transformers),
        ):
            wrapt.register_post_import_hook(self._guarded(watch), name)

    def remove(self) -> None:
        """Remember nothing more. What was wrapped stays and passes calls through."""
        self._active = False

    def of_wrapper(self, wrapper: object) -> str:
        """Where this ``CheckpointWrapper`` was made."""
        return _get(self._wrappers, wrapper)

    def of_composable(self, module: object) -> str:
        """Where composable ``checkpoint`` was applied to this module."""
        return _get(self._composable, module)

    def of_model_with(self, module: object) -> str:
        """Where the enable method of the model that holds this module was called."""
        if not isinstance(module, nn.Module):
            return ""
        site = self._model_sites.get(module)
        if site is None:
            holding = (
                site
                for model, site in self._models.items()
                if any(unwrapped(part) is module for part in model.modules())
            )
            site = self._model_sites[module] = next(holding, "")
        return site

    def _guarded(self, watch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def hook(module: ModuleType) -> None:
            if not self._active:
                return
            try:
                watch(module)
            except Exception as error:  # an import of the user's must not fail because of us
                self.warnings.append(
                    f"Call sites of {module.__name__} are not known in this version: {error}"
                )

        return hook

    def _watch_wrapper(self, module: ModuleType) -> None:
        kind = module.CheckpointWrapper
        original = kind.__init__

        @functools.wraps(original)
        def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            original(wrapper, *args, **kwargs)
            self._remember(self._wrappers, wrapper)

        kind.__init__ = init

    def _watch_composable(self, module: ModuleType) -> None:
        original = module.checkpoint

        @functools.wraps(original)  # carries over `.state`, which its hooks look up
        def checkpoint(target: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(target, *args, **kwargs)
            self._remember(self._composable, target)
            return result

        module.__dict__["checkpoint"] = checkpoint
        parent = sys.modules.get(module.__name__.rpartition(".")[0])
        if parent is not None and getattr(parent, "checkpoint", None) is original:
            parent.__dict__["checkpoint"] = checkpoint

    def _watch_transformers(self, module: ModuleType) -> None:
        kind = module.PreTrainedModel
        for name in _ENABLE_METHODS:
            original = vars(kind).get(name)
            if original is not None:
                setattr(kind, name, self._remembering_model(original))

    def _remembering_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enable(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._remember(self._models, model)
            self._model_sites.clear()
            return original(model, *args, **kwargs)

        return enable

    def _remember(self, where: _Sites, module: object) -> None:
        if self._active and isinstance(module, nn.Module):
            where[module] = self._sites.switched_on_at(sys._getframe(1))


def _get(sites: Mapping[nn.Module, str], module: object) -> str:
    return sites.get(module, "") if isinstance(module, nn.Module) else ""
