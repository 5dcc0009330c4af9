"""Predict the step time after a change, make the change, and measure it.

    python benchmarks/prediction.py                     on the CPU, all cases
    python benchmarks/prediction.py --device cuda       on a GPU, larger models
    python benchmarks/prediction.py "R in N" --keep F   some cases; traces and times stay in F
    python benchmarks/prediction.py --kinds             other kinds of models, held apart
    python benchmarks/prediction.py --again F           predict once more from what is in F
    python benchmarks/prediction.py --again F --halves  what each half of F would have chosen for
                                                        the constants of the prediction

The model is built twice, before and after the change, and both are trained in turn in one
process, a few steps of the one, a few of the other, many times over, so that what else the
machine does falls on both alike. The truth is the median step after; how far it could be off is
said beside it (bootstrap over the turns). The prediction sees what ``recompute-scan run`` records
of the model before: a few timed steps, and behind them a trace. What it makes of them, as a share,
is applied to the median step before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import processor
from benchmarks.prediction_cases import CASES, HELD_APART, Case, Step, build
from benchmarks.prediction_constants import Recorded, show_halves
from recompute_scan.cost.phases import Float64
from recompute_scan.cost.price import keep_last, price
from recompute_scan.cost.reruns import Keep
from recompute_scan.recompute.facts import RecomputeFacts, study
from recompute_scan.record.probe import Probe
from recompute_scan.record.profiler import ProfilerWindow
from recompute_scan.record.steps import StepTimer
from recompute_scan.trace import load


@dataclass(frozen=True)
class Target:
    """What is asked of the predictions, as shares: errors at most, inside the interval at least."""

    median: float
    worst: float
    inside: float = 0.9
    recompute: float = 0.01


TARGETS = {"cpu": Target(median=0.03, worst=0.08), "cuda": Target(median=0.02, worst=0.05)}
WARMUP = 3
LEAST_TURNS = 12
TIMED = 10
PROFILED = 10


@dataclass(frozen=True)
class Measured:
    """Step times in ms.

    Attributes:
        before: One a turn.
        after: Likewise.
        timed: Of the model before, in a row, right before its trace.
    """

    before: list[float]
    after: list[float]
    timed: list[float]


def measure(case: Case, trace: Path, device: torch.device, seconds: float) -> Measured:
    """Train both models in turn, then record the one before the change."""
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    probe = Probe(Path.cwd())
    probe.install()
    torch.set_num_threads(case.threads)
    before, after = (build(case, asked, device) for asked in (case.before, case.after))
    warm = [_timed(step, kind, WARMUP)[-1] for step in (before, after)]
    turns = _agreed(max(LEAST_TURNS, round(1000 * seconds / (2 * sum(warm)))))
    found = Measured([], [], [])
    for turn in range(turns):
        pair = ((before, found.before), (after, found.after))
        for step, times in pair if turn % 2 == 0 else reversed(pair):
            # The first step after the other model's finds the caches full of that.
            times.append(_timed(step, kind, 2)[1])
    _timed(before, kind, WARMUP)
    found.timed.extend(_timed(before, kind, TIMED))
    probe.begin()
    window = ProfilerWindow(lead=1, steps=PROFILED, device=kind, stacks=False)
    before()
    window.start()
    for _ in range(PROFILED + 1):
        before()
        window.step()
    window.export(trace)
    probe.remove()
    return found


def _timed(step: Step, kind: Literal["cpu", "cuda"], steps: int) -> list[float]:
    timer = StepTimer(kind)
    for _ in range(steps):
        step()
        timer.mark()
    return list(timer.milliseconds())


def _agreed(turns: int) -> int:
    """The number of turns that rank 0 wants."""
    if not dist.is_initialized():
        return turns
    wanted = [turns]
    dist.broadcast_object_list(wanted)
    return wanted[0]


def _rank(rank: int, case: Case, trace: Path, device: str, seconds: float, meeting: str) -> None:
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
    found = measure(case, mine, place, seconds)
    if rank == 0:
        mine.replace(trace)
        _write(trace, found)
    else:
        mine.unlink()
    dist.destroy_process_group()


def _write(trace: Path, found: Measured) -> None:
    trace.with_suffix(".times.json").write_text(json.dumps(asdict(found)))


def record(case: Case, trace: Path, device: str, seconds: float) -> None:
    """Measure one case; the trace and, beside it, the times are written."""
    if case.ranks == 1:
        _write(trace, measure(case, trace, torch.device(device), seconds))
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(  # type: ignore[no-untyped-call]
            _rank,
            (case, trace, device, seconds, str(Path(folder) / "store")),
            nprocs=case.ranks,
        )


@dataclass(frozen=True)
class Row:
    """One case of the table; times in ms."""

    case: Case
    before: float
    measured: float
    measured_low: float
    measured_high: float
    predicted: float
    predicted_low: float
    predicted_high: float
    recompute_error: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.predicted_low <= self.measured <= self.predicted_high


@functools.cache
def _studied(trace: Path) -> RecomputeFacts:
    return study(load(trace))


def predict(case: Case, trace: Path) -> Row:
    """The prediction from the trace before the change, beside what was measured."""
    found = Measured(**json.loads(trace.with_suffix(".times.json").read_text()))
    before, after = np.array(found.before), np.array(found.after)
    middle = float(np.median(before))
    low, ratio, high = (middle * value for value in _median_of_ratios(after / before))
    facts = _studied(trace)
    keep = _kept(case)
    cost = price(facts, found.timed, keep or keep_last)
    if cost is None or cost.bare_step_ms is None or cost.bare_low_ms is None:
        raise SystemExit(f"{case.name}: nothing was recomputed in the trace")
    predicted = (cost.predicted_step_ms, cost.predicted_low_ms, cost.predicted_high_ms)
    if keep is None:
        predicted = (cost.bare_step_ms, cost.bare_low_ms, cost.bare_high_ms or np.inf)
    scale = middle / cost.step_ms
    predicted = (scale * predicted[0], scale * predicted[1], scale * predicted[2])
    error = (cost.simulation_error_pct or 0.0) / 100
    return Row(case, middle, ratio, low, high, *predicted, error)


def _median_of_ratios(ratios: Float64) -> tuple[float, float, float]:
    """Median of the turns' ratios after to before, and its 95 % interval by bootstrap."""
    drawn = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(np.median(ratios)), float(high)


def _kept(case: Case) -> Keep | None:
    """Which checkpoint the change leaves, by its place counted from outside."""
    before, after = astuple(case.before), astuple(case.after)
    there = [place for place, variant in enumerate(before) if variant]
    left = [order for order, place in enumerate(there) if after[place]]
    if not left:
        return None
    return lambda checkpoints: checkpoints[min(left[0], len(checkpoints) - 1)]


def show(rows: Sequence[Row], target: Target) -> bool:
    """Print the table and the sums; whether the targets are met."""
    print(
        f"{'case':40} {'before':>8} {'measured after (95 %)':>25} {'predicted (interval)':>25} "
        f"{'error':>7}"
    )
    for row in rows:
        measured = f"{row.measured:8.2f} ({row.measured_low:.2f} to {row.measured_high:.2f})"
        predicted = f"{row.predicted:8.2f} ({row.predicted_low:.2f} to {row.predicted_high:.2f})"
        print(
            f"{row.case.name:40} {row.before:8.2f} {measured:>25} {predicted:>25} "
            f"{100 * row.error:+6.1f}%{'' if row.inside else '  outside'}"
        )
    errors = [abs(row.error) for row in rows]
    recompute = max(row.recompute_error for row in rows)
    doubts = [(row.measured_high - row.measured_low) / (2 * row.measured) for row in rows]
    inside = sum(row.inside for row in rows)
    print(
        f"absolute error: median {100 * np.median(errors):.1f} %, worst {100 * max(errors):.1f} %; "
        f"inside the interval: {inside} of {len(rows)}; unchanged simulation off by at most "
        f"{100 * recompute:.3f} %; "
        f"the measurement itself is known to {100 * np.median(doubts):.1f} % (median)"
    )
    return bool(
        np.median(errors) <= target.median
        and max(errors) <= target.worst
        and inside >= target.inside * len(rows)
        and recompute <= target.recompute
    )


def _recorded(case: Case, trace: Path) -> Recorded:
    found = Measured(**json.loads(trace.with_suffix(".times.json").read_text()))
    ratios = np.array(found.after) / np.array(found.before)
    return Recorded(_studied(trace), 1e6 * np.array(found.timed), _kept(case), ratios)


def main() -> int:
    """Print the table; the status is 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help="parts of names; all by default")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=25.0, help="training time of each case")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="measure nothing")
    parser.add_argument("--kinds", action="store_true", help="other kinds of models")
    parser.add_argument("--halves", action="store_true", help="constants by half")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    folder = options.again or options.keep
    print(f"torch {torch.__version__} on {_machine(options.device)}", flush=True)
    rows, recorded = [], []
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory() as place:
        for number, case in enumerate(HELD_APART if options.kinds else CASES):
            if options.names and not any(part in case.name for part in options.names):
                continue
            if options.device == "cuda" and case.ranks > torch.cuda.device_count():
                continue
            trace = Path(place) / f"{number:02}.json.gz"
            if options.again is None:
                trace.parent.mkdir(parents=True, exist_ok=True)
                print(case.name, file=sys.stderr, flush=True)
                # Ranks that share the cores disturb each other: more turns tell as much.
                record(case, trace, options.device, options.seconds * case.ranks)
            if trace.with_suffix(".times.json").exists():
                rows.append(predict(case, trace))
                recorded.append((case, trace))
        if options.halves:
            show_halves([_recorded(*one) for one in recorded])
    return 0 if rows and show(rows, TARGETS[options.device]) else 1


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else processor()


if __name__ == "__main__":
    sys.exit(main())
