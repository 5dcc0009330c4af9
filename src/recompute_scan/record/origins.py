"""By whose doing a checkpoint is called: mechanism, module and the line that switched it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from torch import nn

from recompute_scan.record.call_sites import CallSites, top_package
from recompute_scan.record.module_names import (
    UNKNOWN,
    ModuleIndex,
    ModuleName,
    covered_modules,
    unwrapped,
)
from recompute_scan.record.switches import COMPOSABLE_MODULE, WRAPPER_MODULE, Switches

_CHECKPOINT_MODULE = "torch.utils.checkpoint"
_ASKING = (WRAPPER_MODULE, COMPOSABLE_MODULE)  # torch's own code that asks for checkpoints


@dataclass(frozen=True)
class Origin:
    """What is known of one checkpoint call; empty text where nothing is."""

    module: ModuleName = UNKNOWN
    mechanism: str = ""
    site: str = ""


class Origins:
    """Reads the origin of a checkpoint call off the stack above it."""

    def __init__(self, sites: CallSites, switches: Switches, index: ModuleIndex) -> None:
        self._sites = sites
        self._switches = switches
        self._index = index

    def of(self, function: object, args: Sequence[object], frame: FrameType | None) -> Origin:
        """The origin of the call whose innermost frame this is.

        Args:
            function: What is checkpointed.
            args: The arguments it is called with.
            frame: A frame inside ``torch.utils.checkpoint``, or the composable one's hook.
        """
        covered = covered_modules(function, args)
        sequential, caller = _caller(frame)
        if caller is None:
            return Origin(self._index.look_up(covered), "torch-checkpoint")
        name = str(caller.f_globals.get("__name__") or "")
        if name == WRAPPER_MODULE:
            wrapper = caller.f_locals.get("self")
            if isinstance(wrapper, nn.Module):
                covered = [unwrapped(wrapper)]
            mechanism, site = "fsdp-wrapper", self._switches.of_wrapper(wrapper)
        elif name == COMPOSABLE_MODULE:
            mechanism, site = "composable-checkpoint", self._switches.of_composable(function)
        elif _is_transformers_model(caller):
            mechanism = "hf-gradient-checkpointing"
            site = self._switches.of_model_with(covered[0]) if covered else ""
        else:
            mechanism = "checkpoint-sequential" if sequential else "torch-checkpoint"
            site = ""
        return Origin(
            self._index.look_up(covered), mechanism, site or self._sites.called_at(caller)
        )


def _caller(frame: FrameType | None) -> tuple[bool, FrameType | None]:
    """Whether ``checkpoint_sequential`` made the call, and the frame that asked for it."""
    sequential = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__") or "")
        if name == _CHECKPOINT_MODULE:
            sequential |= frame.f_code.co_name == "checkpoint_sequential"
        elif name in _ASKING or top_package(frame) not in ("torch", "recompute_scan"):
            return sequential, frame
        frame = frame.f_back
    return sequential, None


def _is_transformers_model(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__") or "")
    package, _, rest = name.partition(".")
    file = rest.rpartition(".")[2]
    # transformers_modules: models whose code comes with their weights.
    return package in ("transformers", "transformers_modules") and (
        file == "modeling_layers" or file.startswith("modeling_")
    )
