"""Fit: checkpoints of a live training, chosen within a memory budget from its first steps."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeVar

from torch import nn

from recompute_scan.cost.plan import Wish, read_wish
from recompute_scan.errors import UsageError
from recompute_scan.fitting.control import Fitted, fitted
from recompute_scan.fitting.layer_plan import read_plan

_Model = TypeVar("_Model", bound=nn.Module)


def fit(
    model: _Model,
    memory: str | int | None = None,
    *,
    step_time_ms: float | None = None,
    replace: bool = False,
    plan: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> _Model:
    """The same model, which chooses its checkpoints in its first training steps.

    Every arrangement computes the same losses and gradients. A step ends with the optimizer's, or
    where ``recompute_scan.step()`` is called.

    Args:
        model: The model, before or after it is wrapped for several processes.
        memory: The limit: bytes, ``60GB``, ``free``, or ``80%`` of the GPU's memory; on a CPU a
            share of the bytes saved for the backward pass when nothing is recomputed.
            ``None`` means 90 %.
        step_time_ms: The longest step instead: then the least memory is chosen.
        replace: Take out the checkpoints that the script has.
        plan: A plan to begin with, as :meth:`Fitted.save` or ``recompute-scan plan`` wrote it.
        quiet: Print nothing; the logger ``recompute_scan.fit`` has it all the same.

    Raises:
        UsageError: Both limits are given, or one is no limit (``E232``).
        InputError: The plan cannot be read (``E306``).
    """
    if isinstance(memory, int):
        if memory <= 0:
            raise UsageError("E232", f"{memory} is no amount of memory.", hint="60GB or 80%")
        wish = Wish("bytes", float(memory), f"{memory} bytes")
    else:
        wish = read_wish(memory or (None if step_time_ms is not None else "90%"), step_time_ms)
    if wish.kind == "time" and not (math.isfinite(wish.amount) and wish.amount > 0):
        raise UsageError("E232", f"{step_time_ms} is no step time.", hint="milliseconds above 0")
    known = None if plan is None else read_plan(Path(plan))
    Fitted(model, wish, replace=replace, say=not quiet).start(known)
    return model


__all__ = ["Fitted", "fit", "fitted"]
