"""The step time after a change to the checkpoints: predicted, and measured after making the change.

The model is built twice, before and after the change, and both are trained in turn in one process,
a few steps of the one, a few of the other, many times over, so that what else the machine does
falls on both alike. Several changes to the same checkpoints take turns together, and share what was
recorded before them. The truth is the median step after; how far it could be off is said beside it
(bootstrap over the turns). The prediction sees what `recompute-scan run` records of the model
before: a few timed steps, and behind them a trace. What it makes of them, as a share, is applied to
the median step before.

  python -m benchmarks prediction                     on the CPU, all cases
  python -m benchmarks prediction --device cuda       on a GPU
  python -m benchmarks prediction "R in N" --keep F   some cases; traces and times stay in F
  python -m benchmarks prediction --kinds             other kinds of models, held apart
  python -m benchmarks prediction --large --device cuda    kinds of models at a GPU's size
  python -m benchmarks prediction --again F           predict once more from what is in F

The status is 1 where a target is missed.
"""

import functools
import gc
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import click
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from benchmarks._frame import (
    Floats,
    Table,
    benchmark,
    folder_option,
    in_turn,
    interval,
    kept_in,
    wanted,
    words,
)
from benchmarks._machine import processor
from benchmarks._prediction_cases import CASES, HELD_APART, LARGE, NONE, Case, Step, build
from recompute_scan.cost.price import keep_last, price
from recompute_scan.cost.reruns import Keep
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.record.profiler import ProfilerWindow
from recompute_scan.record.steps import StepTimer
from recompute_scan.trace import load


class Target(NamedTuple):
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
    """Step times in ms: one a turn before and after the change, and some right before the trace."""

    before: list[float]
    after: list[float]
    timed: list[float]
    trace: str = ""


def measure(
    cases: Sequence[Case], trace: Path, device: torch.device, seconds: float
) -> list[Measured]:
    """Train the model before the changes and the ones after them in turn, then record the first."""
    case = cases[0]
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    probe = Probe(Path.cwd())
    probe.install()
    torch.set_num_threads(case.threads)
    steps = [build(case, asked, device) for asked in (case.before, *(one.after for one in cases))]
    before = steps[0]
    warm = [_timed(step, kind, WARMUP)[-1] for step in steps]
    turns = _agreed(max(LEAST_TURNS, round(1000 * seconds / (2 * sum(warm)))))
    times: list[list[float]] = [[] for _ in steps]
    for step, found in in_turn(list(zip(steps, times, strict=True)), turns):
        # The first step after another model's finds the caches full of that.
        found.append(_timed(step, kind, 2)[1])
    _timed(before, kind, WARMUP)
    timed = _timed(before, kind, TIMED)
    probe.begin()
    window = ProfilerWindow(lead=1, steps=PROFILED, device=kind, stacks=False)
    before()
    window.start()
    for _ in range(PROFILED + 1):
        before()
        window.step()
    window.export(trace)
    probe.remove()
    return [Measured(times[0], after, timed, trace.name) for after in times[1:]]


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


def _rank(rank: int, group: dict[Path, Case], device: str, seconds: float, meeting: str) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    trace, case = next(iter(group.items()))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=FileStore(meeting, case.ranks),
        rank=rank,
        world_size=case.ranks,
    )
    mine = trace.with_name(f"{trace.name}.rank{rank}.json.gz") if rank else trace
    found = measure([*group.values()], mine, place, seconds)
    if rank == 0:
        _write(group, found)
    else:
        mine.unlink()
    dist.destroy_process_group()


def _write(traces: Iterable[Path], measured: Sequence[Measured]) -> None:
    for trace, found in zip(traces, measured, strict=True):
        trace.with_suffix(".times.json").write_text(json.dumps(asdict(found)))


def record(group: dict[Path, Case], device: str, seconds: float) -> None:
    """Measure cases that are alike before the change: one trace, and the times of each."""
    trace, case = next(iter(group.items()))
    if case.ranks == 1:
        _write(group, measure([*group.values()], trace, torch.device(device), seconds))
        return
    with tempfile.TemporaryDirectory() as folder:
        # Ranks that share the cores disturb each other: more turns tell as much.
        given = (group, device, seconds * case.ranks, str(Path(folder) / "store"))
        spawn(_rank, given, nprocs=case.ranks)  # type: ignore[no-untyped-call]


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
    low, ratio, high = (middle * value for value in interval(after / before, _median))
    facts = _studied(trace.with_name(found.trace or trace.name))
    keep = _kept(case)
    cost = price(facts, found.timed, keep or keep_last)
    if cost is None or cost.bare_step_ms is None or cost.bare_low_ms is None:
        raise ValueError("nothing was recomputed in the trace")
    predicted = (cost.predicted_step_ms, cost.predicted_low_ms, cost.predicted_high_ms)
    if keep is None:
        predicted = (cost.bare_step_ms, cost.bare_low_ms, cost.bare_high_ms or np.inf)
    scale = middle / cost.step_ms
    predicted = (scale * predicted[0], scale * predicted[1], scale * predicted[2])
    error = (cost.simulation_error_pct or 0.0) / 100
    return Row(case, middle, ratio, low, high, *predicted, error)


def _median(values: Floats) -> float:
    return float(np.median(values))


def _kept(case: Case) -> Keep | None:
    """Which checkpoint the change leaves, by its place counted from outside."""
    there = [place for place, variant in enumerate(case.before) if variant]
    left = [order for order, place in enumerate(there) if case.after[place]]
    if not left:
        return None
    return lambda checkpoints: checkpoints[min(left[0], len(checkpoints) - 1)]


def show(rows: Sequence[Row], target: Target) -> bool:
    """Print the table and the sums; whether the targets are met."""
    heads = {"case": "<40", "before": ">8.2f", "measured after (95 %)": ">25"}
    table = Table({**heads, "predicted (interval)": ">25", "error": ">+7.1%"})
    for row in rows:
        measured = f"{row.measured:8.2f} ({row.measured_low:.2f} to {row.measured_high:.2f})"
        predicted = f"{row.predicted:8.2f} ({row.predicted_low:.2f} to {row.predicted_high:.2f})"
        note = "" if row.inside else "  outside"
        table.row(row.case.name, row.before, measured, predicted, row.error, note=note)
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


@benchmark
@words()
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--seconds", default=25.0, help="Training time of each case.")
@folder_option("--keep", text="Where traces and times stay.")
@folder_option("--again", text="Measure nothing: predict from what is there.")
@click.option("--kinds", is_flag=True, help="Other kinds of models.")
@click.option(
    "--large", is_flag=True, help="Kinds of models at a GPU's size; on a CPU, small ones."
)
def main(
    words: Sequence[str],
    device: str,
    seconds: float,
    keep: Path | None,
    again: Path | None,
    kinds: bool,
    large: bool,
) -> int:
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    where = torch.cuda.get_device_name() if device == "cuda" else processor()
    print(f"torch {torch.__version__} on {where}", flush=True)
    cases = [
        (number, case)
        for number, case in enumerate(LARGE if large else HELD_APART if kinds else CASES)
        if wanted(case.name, words) and (device == "cpu" or case.ranks <= torch.cuda.device_count())
    ]
    rows, failed = [], False
    with kept_in(again or keep) as place:
        for _, alike in itertools.groupby(cases, lambda one: replace(one[1], name="", after=NONE)):
            group = {place / f"{number:02}.json.gz": case for number, case in alike}
            names = " and ".join(case.name for case in group.values())
            try:
                if again is None:
                    print(names, file=sys.stderr, flush=True)
                    record(group, device, seconds)
                rows += [
                    predict(case, trace)
                    for trace, case in group.items()
                    if trace.with_suffix(".times.json").exists()
                ]
            except Exception as error:  # the other kinds of models are worth having
                failed = True
                print(f"{names}: {type(error).__name__}: {error}", flush=True)
            gc.collect()
    return 0 if rows and show(rows, TARGETS[device]) and not failed else 1
