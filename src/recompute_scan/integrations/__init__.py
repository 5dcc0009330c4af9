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
    from recompute_scan.integrations.accelerate import RecomputeScanTracker
    from recompute_scan.integrations.huggingface import RecomputeScanCallback
    from recompute_scan.integrations.lightning import RecomputeScanLightningCallback


__all__ = ["RecomputeScanCallback", "RecomputeScanLightningCallback", "RecomputeScanTracker"]

_MODULES = {
    "RecomputeScanCallback": "huggingface",
    "RecomputeScanLightningCallback": "lightning",
    "RecomputeScanTracker": "accelerate",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
