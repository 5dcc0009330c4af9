"""What each checkpointed region has done since the last step, in plain counters.

A region is a call site with a module. Counting is all that happens while the script computes; names
are looked up between steps.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from recompute_scan.record.call_sites import CallSites
from recompute_scan.record.caught import Variant
from recompute_scan.record.module_names import covered_modules, unwrapped

_TORCHS_OWN = {torch_checkpoint.__file__: True}
_PASSED_ON = ("torch.utils.checkpoint", "torch._dynamo", "torch._compile", "torch.autograd")


class TalliedRegion:
    """The counters of one region. Those of a step are set to 0 when it has ended.

    Attributes:
        entered: Calls.
        nested: Of these, those during a recompute of another region.
        recomputed: Runs behind the first one of a call.
        again: Of these, behind the second one.
        keeps_random: Whether recomputes draw the forward's random numbers, as the last call has it.
        bits: What the last step did, as one number.
        sampling: What the next call is compared by, if anything.
    """

    __slots__ = (
        "_module",
        "again",
        "bits",
        "entered",
        "function",
        "keeps_random",
        "name",
        "nested",
        "recomputed",
        "sampling",
        "site",
        "variant",
    )

    def __init__(
        self, variant: Variant, module: nn.Module | None, function: str, site: str
    ) -> None:
        self.variant = variant
        self._module = None if module is None else weakref.ref(module)
        self.function = function
        self.site = site
        self.name: str | None = None
        self.entered = self.nested = self.recomputed = self.again = 0
        self.keeps_random = True
        self.bits = 0
        self.sampling: Any = None

    @property
    def module(self) -> nn.Module | None:
        """The module that it covers, while that lives; ``None`` where there is none."""
        return None if self._module is None else self._module()

    @property
    def gone(self) -> bool:
        """Whether it had a module that is no more."""
        return self._module is not None and self._module() is None


class Tallies:
    """All regions of a process, found by who calls and what is called."""

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._by_call: dict[tuple[Any, ...], TalliedRegion] = {}
        self._passed_on = dict(_TORCHS_OWN)
        self.regions: list[TalliedRegion] = []

    def entered(
        self, variant: Variant, function: Any, args: tuple[Any, ...], keeps_random: object
    ) -> TalliedRegion:
        """The region of a call that begins, counted."""
        kind = type(function)
        if kind is functools.partial:
            function = function.func
            kind = type(function)
        held: Any = function
        if kind is MethodType:
            held = function.__self__
        elif kind is FunctionType:
            covered = covered_modules(function, args)
            held = covered[0] if covered else function.__code__
        caller = self._caller(sys._getframe(2))
        key = (id(held), variant, caller and caller.f_code, caller and caller.f_lasti)
        region = self._by_call.get(key)
        if region is None or region.gone:
            region = self._new(key, variant, held, function, caller)
        region.entered += 1
        region.keeps_random = bool(keeps_random)
        return region

    def _caller(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame that is not torch's way to its checkpoint."""
        known = self._passed_on
        while frame is not None:
            file = frame.f_code.co_filename
            passes = known.get(file)
            if passes is None:
                name = str(frame.f_globals.get("__name__") or "")
                passes = known[file] = name.startswith((*_PASSED_ON, "recompute_scan"))
            if not passes:
                return frame
            frame = frame.f_back
        return None

    def _new(
        self,
        key: tuple[Any, ...],
        variant: Variant,
        held: object,
        function: Any,
        caller: FrameType | None,
    ) -> TalliedRegion:
        module = unwrapped(held) if isinstance(held, nn.Module) else None
        named = ""
        if module is None:
            code = held if isinstance(held, CodeType) else None
            named = code.co_name if code is not None else type(held).__name__
        region = TalliedRegion(variant, module, named, self._sites.called_at(caller))
        old = self._by_call.get(key)
        if old is not None:
            self.regions.remove(old)
        self._by_call[key] = region
        self.regions.append(region)
        return region

    def forget_gone(self) -> None:
        """Drop regions whose modules are no more: scripts make a model anew for each phase."""
        gone = [region for region in self.regions if region.gone]
        if gone:
            self.regions = [region for region in self.regions if not region.gone]
            self._by_call = {key: one for key, one in self._by_call.items() if not one.gone}
