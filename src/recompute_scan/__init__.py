"""recompute-scan: find doubled activation checkpointing in a PyTorch training step.

Importing this package costs next to nothing: no torch, no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recompute_scan._step import step
from recompute_scan._version import __version__

if TYPE_CHECKING:
    from recompute_scan.api import Scan, analyze, compare, load_result

__all__ = ["Scan", "__version__", "analyze", "compare", "load_result", "step"]


def __getattr__(name: str) -> Any:
    if name in ("Scan", "analyze", "compare", "load_result"):
        from recompute_scan import api  # noqa: PLC0415 - only when it is used

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
