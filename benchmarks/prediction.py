"""Predict the step time after a change, make the change, and measure it.

    python benchmarks/prediction.py                     on the CPU, all cases
    python benchmarks/prediction.py --device cuda       on a GPU, larger models
    python benchmarks/prediction.py "R in N" --keep F   some cases; traces and times stay in F
    python benchmarks/prediction.py --again F           predict once more from what is in F

The model is built twice, before and after the change, and both are trained in turn in one
process, a few steps of the one, a few of the other, many times over, so that what else the
machine does falls on both alike. The truth is the median step after; how far it could be off is
said beside it (bootstrap over the turns). The prediction sees one trace of the model before,
recorded as ``recompute-scan run`` records it, and the times of that model's steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prediction_cases import CASES, Case, Step, build

from recompute_scan.record.probe import Probe
from recompute_scan.record.profiler import Window
from recompute_scan.record.timing import StepTimer

WARMUP = 3
PROFILED = 5


@dataclass(frozen=True)
class Measured:
    """Step times of all turns, in ms: one row a turn, one column a step."""

    before: list[list[float]]
    after: list[list[float]]


def measure(case: Case, trace: Path, device: torch.device, turns: int, steps: int) -> Measured:
    """Train both models in turn, then record the one before the change."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    probe = Probe(Path.cwd())
    probe.install()
    before, after = (build(case, asked, device) for asked in (case.before, case.after))
    for step in (before, after):
        for _ in range(WARMUP):
            step()
    found = Measured([], [])
    for turn in range(turns):
        pair = ((before, found.before), (after, found.after))
        for step, times in pair if turn % 2 == 0 else reversed(pair):
            times.append(_timed(step, kind, steps))
    probe.begin()
    window = Window(lead=1, steps=PROFILED, device=kind, stacks=False)
    before()
    window.start()
    for _ in range(PROFILED + 1):
        before()
        window.step()
    window.export(trace)
    probe.remove()
    return found


def _timed(step: Step, kind: str, steps: int) -> list[float]:
    step()
    timer = StepTimer(kind)  # type: ignore[arg-type]
    for _ in range(steps):
        step()
        timer.mark()
    return list(timer.milliseconds())


def _rank(
    rank: int, case: Case, trace: Path, device: str, turns: int, steps: int, meeting: str
) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=FileStore(meeting, case.ranks),
        rank=rank,
        world_size=case.ranks,
    )
    mine = trace.with_name(f"{trace.name}.rank{rank}.json.gz")
    found = measure(case, mine, place, turns, steps)
    if rank == 0:
        mine.replace(trace)
        _write(trace, found)
    else:
        mine.unlink()
    dist.destroy_process_group()


def _write(trace: Path, found: Measured) -> None:
    times = {"before": found.before, "after": found.after}
    trace.with_suffix(".times.json").write_text(json.dumps(times))


def record(case: Case, trace: Path, device: str, turns: int, steps: int) -> None:
    """Measure one case; the trace and, beside it, the times are written."""
    if case.ranks == 1:
        _write(trace, measure(case, trace, torch.device(device), turns, steps))
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            _rank,
            (case, trace, device, turns, steps, str(Path(folder) / "store")),
            nprocs=case.ranks,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.keep.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    for number, case in enumerate(CASES):
        if options.names and not any(n in case.name for n in options.names):
            continue
        trace = options.keep / f"{number:02}.json.gz"
        record(case, trace, options.device, options.turns, options.steps)
        t = json.loads(trace.with_suffix(".times.json").read_text())
        b, a = np.array(t["before"]), np.array(t["after"])
        mb, ma = np.median(b, axis=1), np.median(a, axis=1)
        r = ma / mb
        print(f"{number:02} {case.name:40} {np.median(b):8.3f} {np.median(a):8.3f} ratio {np.median(r):.4f} iqr {np.quantile(r,.25):.4f} {np.quantile(r,.75):.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
