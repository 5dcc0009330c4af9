"""Recording from where a framework calls back: its trainer says where steps end.

``HuggingFaceCallback`` for the Trainer of transformers (and of libraries on top of it),
``LightningCallback`` for that of Lightning, ``AccelerateTracker`` for ``Accelerator(log_with=…)``.
Each takes what :func:`recompute_scan.record` takes and has a ``scan`` when the training is over.
The framework is imported when its class is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recompute_scan.callbacks.accelerate_tracker import AccelerateTracker
    from recompute_scan.callbacks.huggingface_callback import HuggingFaceCallback
    from recompute_scan.callbacks.lightning_callback import LightningCallback

__all__ = ["AccelerateTracker", "HuggingFaceCallback", "LightningCallback"]

_WHERE = {
    "AccelerateTracker": "accelerate_tracker",
    "HuggingFaceCallback": "huggingface_callback",
    "LightningCallback": "lightning_callback",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
