"""Watches who switches checkpoints on, and which modules they recompute, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from recompute_scan.frameworks.known import MECHANISMS
from recompute_scan.record.call_sites import CallSites
from recompute_scan.record.caught import Variant
from recompute_scan.record.checkpoint_calls import CheckpointCalls
from recompute_scan.record.compared_regions import ComparedRegions
from recompute_scan.record.guard import Guard
from recompute_scan.record.module_names import ModuleIndex
from recompute_scan.record.origins import Origin, Origins
from recompute_scan.record.patches import Patches, Undo
from recompute_scan.record.policies import DecisionWatch
from recompute_scan.record.region_ranges import UNNAMED, AnnotatedRegions, can_annotate
from recompute_scan.record.switches import Switches
from recompute_scan.run_info import SwitchedOn


class Probe:
    """The annotations of one process.

    Attributes:
        sites: Source lines of the call sites that were named.
        warnings: What could not be watched in this version of torch.
        switched_on: Ways of checkpointing that were on when recording last began.
        entered: Calls of checkpointed regions so far, by variant.
        functions: Line that calls each checkpoint function whose runs are not annotated, by name.
        comparison: The step whose recomputes are compared with their forward.
        policies: The step in which policies of selective checkpoints are seen deciding.
        untrained: Looks for weights that a reentrant checkpoint keeps from their gradients.
    """

    def __init__(self, start_folder: Path, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.sites = CallSites(start_folder)
        self._switches = Switches(self.sites, self._guard)
        self._index = ModuleIndex()
        self._origins = Origins(self.sites, self._switches, self._index)
        self._patches = Patches()
        annotated = AnnotatedRegions(self._origins, self._guard)
        self.comparison = ComparedRegions(annotated, self._index, self._guard)
        self.policies = DecisionWatch(self.sites, self._guard, lambda: annotated.within)
        self._calls = CheckpointCalls(self.comparison, self.sites, self._patches, self._guard)
        self.comparison.functions = self._calls.watched
        self.untrained = self._calls.untrained
        self.entered = self._calls.entered
        self.functions = self._calls.functions
        self._warnings: list[str] = []
        self.switched_on: tuple[SwitchedOn, ...] = ()
        self._left_out = False

    @property
    def warnings(self) -> list[str]:
        """What could not be watched, one sentence each."""
        return [*self._warnings, *self._switches.warnings, *self._guard.left_out]

    def install(self) -> None:
        """Begin to watch; before the script is imported."""
        if not can_annotate():
            self._cannot_watch("reentrant")
            self._cannot_watch("non-reentrant")
            return
        self._switches.install()
        if not self._calls.watch_reentrant():
            self._cannot_watch("reentrant")
        if not self._calls.watch_non_reentrant():
            self._cannot_watch("non-reentrant")
        for entry in dict.fromkeys(e for m in MECHANISMS for e in m.watched):
            self._calls.watch_others(entry)

    def remove(self) -> None:
        """Put torch's own functions back, and the libraries'."""
        self.comparison.compared()
        self.policies.end()
        self._switches.remove()
        self._patches.undo()

    def at_removal(self, undo: Undo) -> None:
        """Something else to call when torch's functions are put back."""
        self._patches.add(undo)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the body switches on is not the script's."""
        with self._switches.aside():
            yield

    def leave_out(self, why: str) -> None:
        """Annotate nothing from here on, nor say what is on, and warn why."""
        self.remove()
        self._left_out = True
        self._warn(why)

    def begin(self) -> None:
        """Recording is about to start: learn the modules there are now, and what is on."""
        if self._left_out:
            return
        with self._guard.part("Modules could not be named"):
            self._calls.watch_own()
            self._index.rebuild()
            self.switched_on = self._switches.still_on()

    def asker(
        self,
        function: object,
        args: tuple[object, ...],
        frame: FrameType | None,
        options: Sequence[str] = (),
    ) -> Origin:
        """Module, mechanism and site of the checkpoint call whose innermost frame this is, as
        annotated.
        """
        found = [Origin()]
        with self._guard.part(UNNAMED):
            found.append(self._origins.asker(function, args, frame, options))
        return found[-1]

    def look_at_gradients(self) -> None:
        """A step has ended: see whether the weights in suspected regions have gradients."""
        with self._guard.part("Gradients could not be seen"), torch._C.DisableTorchFunction():
            self.untrained.look()

    def _cannot_watch(self, variant: Variant) -> None:
        self._warn(
            f"This version of torch ({torch.__version__}) has no {variant} checkpoint where it is "
            "looked for, so its regions carry no annotations in the trace."
        )

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)
