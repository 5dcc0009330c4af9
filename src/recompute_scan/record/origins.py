"""By whose doing a checkpoint is called: mechanism, module and the line that switched it on."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from types import CodeType, FrameType

from msgspec import Struct
from msgspec.structs import replace
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from recompute_scan.annotations import COUNTS_RUNS, SELECTIVE
from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.known import recognise
from recompute_scan.record.call_sites import CallSites, place_of, top_package
from recompute_scan.record.caught import counts_runs
from recompute_scan.record.given import variables
from recompute_scan.record.module_names import (
    UNKNOWN,
    ModuleIndex,
    ModuleName,
    covered_modules,
    unwrapped,
)
from recompute_scan.record.switches import COMPOSABLE_MODULE, NOWHERE, WRAPPER_MODULE, Switches

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
