"""What each checkpointed region has done since the last step, in plain counters.

A region is a call site with a module. Counting is all that happens while the script computes; names
are looked up between steps.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
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
        nested: Of these, those during a recompute of another region.
        recomputed: Runs behind the first one of a call.
        again: Of these, behind the second one.
        keeps_random: Whether recomputes draw the forward's random numbers, as the last call has it.
        bits: What the last step did, as one number.
        sampling: What the next call is compared by, if anything.
    """

    __slots__ = (
        "_held",
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
        self,
        variant: Variant,
        module: nn.Module | None,
        function: str,
        site: str,
        held: object = None,
    ) -> None:
        self.variant = variant
        self._module = None if module is None else weakref.ref(module)
        self._held: Callable[[], object]
        try:  # code is kept, for its address; nothing else that the script may let go
            self._held = (lambda: held) if isinstance(held, CodeType) else weakref.ref(held)
        except TypeError:
            self._held = lambda: held
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

    def holds(self, held: object) -> bool:
        """Whether it is this that was called, and not another at the same address."""
        return self._held() is held

    @property
    def gone(self) -> bool:
        """Whether it had a module, or another object that was called, which is no more."""
        return (self._module is not None and self._module() is None) or self._held() is None


class Tallies:
    """All regions of a process, found by who calls and what is called.

    What a call needs once it is known is little: where its module was found the last time, and
    how many frames of torch are before its caller's, are tried before they are searched for.
    """

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._by_call: dict[tuple[Any, ...], TalliedRegion] = {}
        self._passed_on = dict(_TORCHS_OWN)
        self._distance: dict[Variant, int] = {"reentrant": 2, "non-reentrant": 2}
        # By address, since a code's hash is slow; so the code is kept.
        self._cells: dict[int, tuple[int, CodeType]] = {}
        self.regions: list[TalliedRegion] = []

    def entered(
        self, variant: Variant, function: Any, args: tuple[Any, ...], at: int
    ) -> TalliedRegion:
        """The region of a call that begins, counted.

        Args:
            variant: Which kind of checkpoint it is.
            function: What is checkpointed.
            args: Positional arguments of torch's function.
            at: Where among them the function is.
        """
        kind = type(function)
        if kind is functools.partial:
            function = function.func
            kind = type(function)
        held: Any = function
        if kind is MethodType:
            held = function.__self__
        elif kind is FunctionType:
            cell = self._cells.get(id(function.__code__))
            try:
                held = None if cell is None else function.__closure__[cell[0]].cell_contents
            except ValueError:  # emptied meanwhile
                held = None
            if not isinstance(held, nn.Module):
                held = self._searched(function, args[at + 1 :])
        known = self._passed_on
        frame: FrameType | None
        try:
            frame = sys._getframe(self._distance[variant])
        except ValueError:  # the stack is less deep
            frame = None
        caller = frame and frame.f_back
        if (
            frame is None
            or caller is None
            or not known.get(frame.f_code.co_filename)
            or known.get(caller.f_code.co_filename, True)
        ):
            caller = self._caller(variant, sys._getframe(1))
        key = (id(held), variant, caller and id(caller.f_code), caller and caller.f_lasti)
        region = self._by_call.get(key)
        if region is None or not region.holds(held):
            region = self._new(key, variant, held, function, caller)
        region.entered += 1
        return region

    def _searched(self, function: FunctionType, args: tuple[Any, ...]) -> object:
        """The module that a function runs, else its code."""
        code = function.__code__
        # Since 2.14, torch has the function's arguments in a tuple.
        spread = [x for one in args for x in (one if isinstance(one, tuple) else (one,))]
        covered = covered_modules(function, spread)
        if not covered:
            return code
        for number, cell in enumerate(function.__closure__ or ()):
            with suppress(ValueError):  # not filled in yet
                held = cell.cell_contents
                if isinstance(held, nn.Module) and unwrapped(held) is covered[0]:
                    self._cells[id(code)] = number, code
                    return held
        return covered[0]

    def _caller(self, variant: Variant, frame: FrameType | None) -> FrameType | None:
        """The innermost frame that is not torch's way to its checkpoint."""
        known, distance = self._passed_on, -1
        while frame is not None:
            file = frame.f_code.co_filename
            passes = known.get(file)
            if passes is None:
                name = str(frame.f_globals.get("__name__") or "")
                passes = known[file] = name.startswith((*_PASSED_ON, "recompute_scan"))
            if not passes:
                self._distance[variant] = max(distance, 0) + 1
                return frame
            frame = frame.f_back
            distance += 1
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
        region = TalliedRegion(variant, module, named, self._sites.called_at(caller), held)
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
