"""What a process that the script starts with multiprocessing runs in place of its target.

It is sent there by pickle, so this module is read in every such process, and brings torch into
none that has not imported it by itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """The target, recorded where it trains.

    Attributes:
        target: What the script gave.
        options: How to record it, for :func:`recompute_scan.record.children.run_here`.
        number: How many such processes the script had started before.
    """

    target: Callable[..., Any]
    options: Any
    number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, and leave its traces and account in the run's folder."""
        if "torch" not in sys.modules:
            return self.target(*args, **kwargs)
        # By name: what imports this module is what is imported here.
        children = importlib.import_module("recompute_scan.record.children")
        return children.run_here(self.target, args, kwargs, self.options, self.number)
