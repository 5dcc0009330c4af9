"""Run a script as Python does, and count how often each module's forward runs in a backward pass.

    python tests/real/counting.py OUT.json [-m] SCRIPT ARGS…

Knows nothing of this project: a hook on every module counts its calls, and autograd itself tells
whether a backward pass is under way. OUT gets the most recomputes per forward of any module with
parameters of its own, the share of those modules that were recomputed at all, and the processor
time of each step, from one step of an optimizer to the next. Under torchrun each rank writes
OUT.jsonRANK.
"""

import atexit
import json
import os
import runpy
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

forwards: Counter[int] = Counter()
without_gradients: Counter[int] = Counter()
again: Counter[int] = Counter()
names: dict[int, str] = {}
kept: list[torch.nn.Module] = []
stepped: list[float] = []


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
    if all(parameter is None for parameter in module._parameters.values()):
        return
    if id(module) not in names:
        names[id(module)] = type(module).__name__
        # No other module gets its number.
        kept.append(module)
    if torch._C._current_graph_task_id() != -1:
        again[id(module)] += 1
    elif module.training and (torch.is_grad_enabled() or _checkpointed()):
        forwards[id(module)] += 1
    elif module.training:
        without_gradients[id(module)] += 1


def step(*_: Any) -> None:
    """An optimizer made a step."""
    stepped.append(time.process_time())


def write(path: str) -> None:
    """The counts so far."""
    # What backward passes run, and no forward ran with gradients, an autograd function of the
    # script's own runs again: its forwards are those without.
    for key in again.keys() - forwards.keys():
        forwards[key] = without_gradients[key]
    ratios = [again[key] / times for key, times in forwards.items() if times]
    most = max(ratios, default=0.0)
    some = sum(ratio > 0 for ratio in ratios) / len(ratios) if ratios else 0.0
    found = {
        "most": most,
        "share": some,
        "modules": len(ratios),
        "kinds": sorted({names[key] for key in again}),
        "step_s": [late - early for early, late in pairwise(stepped)],
    }
    Path(path + os.environ.get("RANK", "")).write_text(json.dumps(found))


def main() -> None:
    """Count, and run what is named as the main program."""
    _, out, *rest = sys.argv
    register_module_forward_pre_hook(count)
    register_optimizer_step_post_hook(step)
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
