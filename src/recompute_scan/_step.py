"""``recompute_scan.step()``: how a script says itself that a training step has ended."""

from __future__ import annotations

from collections.abc import Callable

# Recordings, guards and fitted models of this process hear it.
listeners: list[Callable[[], None]] = []


def step() -> None:
    """Say that one training step has ended, in a loop that has no ``torch.optim`` optimizer.

    Call it once at the end of each step. Under ``recompute-scan run``, in a ``%%recompute`` cell,
    for a guard and for ``fit`` it then replaces optimizers' steps; elsewhere it does nothing.
    """
    for listener in tuple(listeners):
        listener()
