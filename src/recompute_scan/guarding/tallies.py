"""What each checkpointed region has done since the last step, in plain counters.

A region is a module, or a function, with a variant, whichever line calls it. Counting is all that
happens while the script computes; names are looked up between steps.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
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
        nested: Of these, those that ran during a recompute of another region.
        recomputed: Runs behind the first one of a call.
        again: Of these, behind the second one.
        handed_on: How often a run behind the first met another checkpoint of the same module. What
            that one counts is all that ran of it again, and where it keeps its inputs to itself,
            nothing did.
        keeps_random: Whether recomputes draw the forward's random numbers, as the last call has it.
        bits: What the last step did, as one number.
        held: What was called, while it lives; ``None`` where it is kept.
        code: What is kept, so that nothing else has its address.
        sampling: What the next call is compared by, if anything.
    """

    __slots__ = (
        "_module",
        "again",
        "bits",
        "code",
        "entered",
        "function",
        "handed_on",
        "held",
        "keeps_random",
        "name",
        "nested",
        "recomputed",
        "sampling",
        "site",
        "variant",
    )

    def __init__(
        self,
        variant: Variant,
        module: nn.Module | None,
        function: str,
        site: str,
    ) -> None:
        self.variant = variant
        self._module = None if module is None else weakref.ref(module)
        self.held: weakref.ref[Any] | None = None
        self.code: object = None
        self.function = function
        self.site = site
        self.name: str | None = None
        self.entered = self.nested = self.recomputed = self.again = self.handed_on = 0
        self.keeps_random = True
        self.bits = 0
        self.sampling: Any = None

    @property
    def module(self) -> nn.Module | None:
        """The module that it covers, while that lives; ``None`` where there is none."""
        return None if self._module is None else self._module()

    @property
    def runs_again(self) -> bool:
        """Whether its own recomputes ran the module, and not another checkpoint of it."""
        return self.recomputed > self.handed_on

    def covers(self, other: TalliedRegion) -> bool:
        """Whether both are checkpoints of the same module."""
        return self._module is not None and self.module is other.module

    @property
    def gone(self) -> bool:
        """Whether it had a module, or another object that was called, which is no more."""
        return (self._module is not None and self._module() is None) or (
            self.held is not None and self.held() is None
        )


class Tallies:
    """All regions of a process, found by what is called.

    A checkpointed module is known by its address, until it is no more. Functions are made anew for
    each call, as a rule, and are known by their code and the module that they run.
    """

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._known: dict[Variant, dict[Any, TalliedRegion]] = {}
        self._passed_on = dict(_TORCHS_OWN)
        # By address, since a code's hash is slow; so the code is kept.
        self._cells: dict[int, tuple[int, CodeType]] = {}
        self.regions: list[TalliedRegion] = []

    def of(self, variant: Variant) -> Mapping[int, TalliedRegion]:
        """Regions of modules that are called themselves, by their addresses."""
        return self._known.setdefault(variant, {})

    def found(
        self, variant: Variant, args: tuple[Any, ...], at: int
    ) -> tuple[int, TalliedRegion | None]:
        """The region of a call, and where among the arguments its function is.

        Args:
            variant: Which kind of checkpoint it is.
            args: Positional arguments of torch's function.
            at: Where the function is as a rule.
        """
        if not (len(args) > at and callable(args[at])):
            at = next((n for n, one in enumerate(args[:4]) if callable(one)), -1)
            if at < 0:
                return at, None
        function = args[at]
        kind = type(function)
        if kind is functools.partial:
            function = function.func
            kind = type(function)
        held: Any = function
        key: Any = None
        if kind is MethodType:
            held = function.__self__
        elif kind is FunctionType:
            held = self._module_of(function, args[at + 1 :])
            key = id(held), id(function.__code__)
        elif not isinstance(function, nn.Module):  # an object, made for the call perhaps
            parts = getattr(function, "__dict__", {}).values()
            held = next((one for one in parts if isinstance(one, nn.Module)), kind)
            key = id(held), id(kind)
        regions = self._known.setdefault(variant, {})
        region = regions.get(key or id(held))
        if region is None:
            region = self._new(regions, key or id(held), variant, held, function)
        return at, region

    def _module_of(self, function: FunctionType, args: tuple[Any, ...]) -> object:
        """The module that a function runs, else its code."""
        code = function.__code__
        cell = self._cells.get(id(code))
        if cell is not None and function.__closure__ is not None:
            with suppress(ValueError):  # emptied meanwhile
                held = function.__closure__[cell[0]].cell_contents
                if isinstance(held, nn.Module):
                    return held
        # Since 2.14, torch has the function's arguments in a tuple.
        spread = [x for one in args for x in (one if isinstance(one, tuple) else (one,))]
        covered = covered_modules(function, spread)
        if not covered:
            return code
        for number, closed in enumerate(function.__closure__ or ()):
            with suppress(ValueError):  # not filled in yet
                held = closed.cell_contents
                if isinstance(held, nn.Module) and unwrapped(held) is covered[0]:
                    self._cells[id(code)] = number, code
                    return held
        return covered[0]

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
        regions: dict[Any, TalliedRegion],
        key: object,
        variant: Variant,
        held: object,
        function: Any,
    ) -> TalliedRegion:
        module = unwrapped(held) if isinstance(held, nn.Module) else None
        named = ""
        if module is None:
            code = held if isinstance(held, CodeType) else None
            kind = held if isinstance(held, type) else type(held)
            named = code.co_name if code is not None else kind.__name__
        site = self._sites.called_at(self._caller(sys._getframe(2)))
        region = TalliedRegion(variant, module, named, site)
        # What has the address next is another. Code is kept, and what cannot be watched.
        region.code = getattr(function, "__code__", None)
        try:
            if not isinstance(held, CodeType):
                region.held = weakref.ref(held, lambda _: regions.pop(key, None))
        except TypeError:
            region.code = held
        regions[key] = region
        self.regions.append(region)
        return region

    def forget_gone(self) -> None:
        """Drop regions whose modules are no more: scripts make a model anew for each phase."""
        if any(region.gone for region in self.regions):
            self.regions = [region for region in self.regions if not region.gone]
