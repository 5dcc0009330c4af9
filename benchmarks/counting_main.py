"""Run a script as Python does, and count how often each module's forward runs in a backward pass.

    python benchmarks/counting_main.py OUT.json [-m] SCRIPT ARGS…

Knows nothing of this project: a hook on every module counts its calls, and autograd itself tells
whether a backward pass is under way. OUT gets the most recomputes per forward of any module with
parameters of its own, and the share of those modules that were recomputed at all.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

forwards: Counter[int] = Counter()
again: Counter[int] = Counter()
names: dict[int, str] = {}


def _checkpointed() -> bool:
    """A reentrant checkpoint's forward runs without gradients, inside torch's checkpoint."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def count(module: torch.nn.Module, _: Any) -> None:
    """One call of one module: in a backward pass, or in a forward that one will follow."""
    if not next(iter(module._parameters), None):
        return
    if torch._C._current_graph_task_id() != -1:
        again[id(module)] += 1
        names[id(module)] = type(module).__name__
    elif module.training and (torch.is_grad_enabled() or _checkpointed()):
        forwards[id(module)] += 1


def write(path: str) -> None:
    """The counts so far."""
    ratios = [again[key] / times for key, times in forwards.items()]
    most = max(ratios, default=0.0)
    some = sum(ratio > 0 for ratio in ratios) / len(ratios) if ratios else 0.0
    found = {
        "most": most,
        "share": some,
        "modules": len(ratios),
        "kinds": sorted({*names.values()}),
    }
    Path(path).write_text(json.dumps(found))


def main() -> None:
    """Count, and run what is named as the main program."""
    _, out, *rest = sys.argv
    register_module_forward_pre_hook(count)
    atexit.register(write, str(Path(out).absolute()))
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
