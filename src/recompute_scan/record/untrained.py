"""Weights that get no gradient because a reentrant checkpoint hides them.

A reentrant checkpoint connects its output to its inputs only. Where no input needs a gradient,
the weights inside get none, torch warns once, and training goes on without them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from recompute_scan.record.module_names import covered_modules, plain_name, root_modules


class Untrained:
    """Looks for such weights, in regions that were entered without an input that needs a gradient.

    Attributes:
        suspected: Whether there was such a region at all, in training mode.
        names: Modules whose weights are trainable and have no gradient after a backward pass, in
            a model of which other weights have one.
    """

    def __init__(self) -> None:
        self.suspected = False
        self.names: tuple[str, ...] = ()
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._looked: set[int] = set()

    def entered(self, function: object, args: Iterable[object]) -> None:
        """A reentrant region is entered with these arguments, of which none needs a gradient."""
        for module in covered_modules(function, args):
            if module.training and any(p.requires_grad for p in module.parameters()):
                self.suspected = True
                self._modules.setdefault(id(module), weakref.ref(module))

    def look(self) -> None:
        """A step has ended and its gradients are still there."""
        new = {key: ref() for key, ref in self._modules.items() if key not in self._looked}
        if not new:
            return
        self._looked |= set(new)
        missing = {
            key
            for key, module in new.items()
            if module is not None
            and all(p.grad is None for p in module.parameters() if p.requires_grad)
        }
        if missing:
            self.names += tuple(_named(missing))


def _named(modules: set[int]) -> list[str]:
    """Names of the modules, in models that are being trained otherwise."""
    return [
        plain_name(name) or type(module).__name__
        for root in root_modules()
        if any(parameter.grad is not None for parameter in root.parameters())
        for name, module in root.named_modules()
        if id(module) in modules
    ]
