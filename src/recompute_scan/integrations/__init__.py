"""Callbacks and trackers of training frameworks.

``RecomputeScanCallback`` is for the Trainer of transformers (and of libraries on top of it),
``RecomputeScanLightningCallback`` for Lightning's, ``RecomputeScanTracker`` for
``Accelerator(log_with=…)``. Each takes what :func:`recompute_scan.record` takes, and has a ``scan``
when the training is over. The framework is imported when its class is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recompute_scan.integrations.trainers import (
        RecomputeScanCallback,
        RecomputeScanLightningCallback,
        RecomputeScanTracker,
    )


__all__ = ["RecomputeScanCallback", "RecomputeScanLightningCallback", "RecomputeScanTracker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.trainers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
