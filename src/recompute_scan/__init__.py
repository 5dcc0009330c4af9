"""recompute-scan: find doubled activation checkpointing in a PyTorch training step.

Importing this package costs next to nothing: no torch, no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from recompute_scan._step import step
from recompute_scan._version import __version__

if TYPE_CHECKING:
    from recompute_scan.api import Scan, analyze, compare, load_result
    from recompute_scan.fitting import fit, fitted
    from recompute_scan.guarding.guard import guard
    from recompute_scan.record.recording import record

__all__ = [
    "Scan",
    "__version__",
    "analyze",
    "compare",
    "fit",
    "fitted",
    "guard",
    "load_result",
    "record",
    "step",
]

_WHERE = {
    "Scan": "api",
    "analyze": "api",
    "compare": "api",
    "fit": "fitting",
    "fitted": "fitting",
    "guard": "guarding.guard",
    "load_ipython_extension": "integrations.cells",
    "load_result": "api",
    "unload_ipython_extension": "integrations.cells",
}


def __getattr__(name: str) -> Any:
    if name == "record":  # a package that can be called
        return importlib.import_module(f"{__name__}.record")
    if name in _WHERE:  # only when it is used
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
