"""Counting the runs of modules that know nothing of the oracle, by wrapping their ``forward``."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .model import Oracle


def watch(
    oracle: Oracle, module: nn.Module, layer: str, part: str, method: str = "forward"
) -> None:
    """Count every entry of ``module.method`` as one of that part of that layer."""
    inner = getattr(module, method)

    def counted(*args: Any, **kwargs: Any) -> Any:
        oracle.enter(layer, part, module.training)
        return inner(*args, **kwargs)

    setattr(module, method, counted)


def watch_whole_runs(oracle: Oracle, module: nn.Module, layer: str, part: str) -> None:
    """Count runs that came to their end: one that early stop cuts short does not."""
    inner: Callable[..., Any] = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        oracle.enter(layer, part, module.training)
        return result

    module.forward = counted


@contextlib.contextmanager
def unwatched(oracle: Oracle) -> Iterator[None]:
    """What runs inside is counted nowhere: it belongs to no forward pass and to no checkpoint."""
    before = oracle.entries.copy()
    try:
        yield
    finally:
        oracle.entries.clear()
        oracle.entries.update(before)
