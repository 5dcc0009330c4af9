"""Says, while it still trains, that a script makes no step that could be seen.

Without steps nothing is recorded, and who trains for days should not learn that at the end.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.patches import Patches
from recompute_scan.record.steps import StepCounter, in_backward

# More than most scripts have micro-batches in a step.
PASSES = 50


class Unstepped:
    """Counts backward passes until the first step, or until it has said that there is none."""

    def __init__(self, counter: StepCounter, guard: Guard) -> None:
        self._counter = counter
        self._guard = guard
        self._passes = 0
        self._over = False
        self._patches = Patches()

    def install(self) -> None:
        """Begin to count."""
        real = torch.autograd.backward
        self._patches.replace(torch.autograd, "backward", self._guard.around(real, self._backward))

    def remove(self) -> None:
        """Count no more."""
        self._over = True
        self._patches.undo()

    def _backward(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if self._over or in_backward():
            return result
        self._passes += 1
        if self._counter.steps or self._passes >= PASSES:
            self.remove()
            if not self._counter.steps and rank_facts().rank == 0:
                self._say()
        return result

    def _say(self) -> None:
        print(
            f"recompute-scan: {self._passes} backward passes, and no step of a torch.optim "
            "optimizer so far: without steps nothing is recorded.\ntry: call "
            "recompute_scan.step() at the end of each step",
            file=sys.stderr,
            flush=True,
        )
