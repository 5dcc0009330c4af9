"""Recording: run the user's script unchanged and keep its traces. Needs torch.

Importing it without torch raises :class:`~recompute_scan.errors.MissingExtra`. The package can
be called: ``recompute_scan.record(steps=5)`` is :func:`recompute_scan.record.recording.record`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from recompute_scan.errors import MissingExtra

try:
    import torch  # noqa: F401
    import wrapt  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "wrapt"):
        raise
    raise MissingExtra(error.name, "torch", "Recording") from None


class _Callable(ModuleType):
    """A package that can be called, since a function has its name too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from recompute_scan.record.recording import record  # noqa: PLC0415 - not for `run`

        return record(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
