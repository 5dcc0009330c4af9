"""What recording costs the steps that are not recorded: before the first, while steps are timed,
and after the last one; and what the step costs in which recomputes are compared.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 0       the calls alone
    python benchmarks/overhead.py --width 16 --rows 8 --blocks 1 --rounds 150

One process, one model. Short blocks of steps go in pairs, one without us and one with, in random
order, so that whatever else the machine does falls on both alike. What is ours is put in and taken
out between them; the first steps behind that are not measured, in which the interpreter gets used
to it (attributes of classes have changed, which empties its caches). Everything runs in one thread,
so the time of the processor holds all that is done. Two estimates with 95 % intervals (bootstrap):
the quickest tenth of the steps with us against that of those without, which other work on the
machine disturbs least, and the median of the ratios within pairs. Pairs of which both blocks are
without us say what each can tell.

The model is the worst case: every block of it is checkpointed as a whole (reentrant) and in two
halves (non-reentrant), three checkpoint calls a block and more in the recomputes.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

import recompute_scan
from recompute_scan.record.probe import Probe
from recompute_scan.record.recording import Recording
from recompute_scan.record.steps import StepCounter, StepHooks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compared_step import table
from benchmarks.machine import processor, versions
from benchmarks.nested_training import Training, nothing

_RESAMPLES = 500
_CALLS = 40
# Steps of a block: those that are left out, and those that are measured.
SETTLE, STEPS = 6, 8
# Without us, and with: ms of the processor.
Pair = tuple[float, float]
# More steps than any benchmark makes: a phase that does not end.
_FOREVER = 10**9
# Warm-up and timed steps of a recording that stays in one phase.
PHASES = {"before": (_FOREVER, 0), "timed": (1, _FOREVER)}


class Watched(AbstractContextManager[None]):
    """A recording of which nothing is left in the process but within a ``with`` block.

    Args:
        recording: It has begun, and is in the phase that is measured.
        as_run: Whether the optimizer's steps are watched too, as ``recompute-scan run`` does.
    """

    def __init__(self, recording: Recording, *, as_run: bool = False) -> None:
        self.recording = recording
        self._as_run = as_run
        self._hooks: StepHooks | None = None
        self._take_out()

    def __enter__(self) -> None:
        live = self.recording._live
        assert live is not None
        live.install()
        if self._as_run:
            self._hooks = StepHooks(StepCounter(), self)
            self._hooks.install()
            # The first optimizer of its kind that is made gets the class watched.
            torch.optim.AdamW([nn.Parameter(torch.zeros(1))])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._take_out()

    def restart(self) -> None:
        """One optimizer makes all steps, so that this is not called."""

    def boundary(self) -> None:
        """The optimizer has made its step."""
        self.recording.step()

    def _take_out(self) -> None:
        live = self.recording._live
        assert live is not None
        live.recorder.others.remove()
        live.probe.remove()


@dataclass(frozen=True)
class Mode:
    """One kind of step: what is put in for it, and what the loop calls behind it."""

    name: str
    inside: AbstractContextManager[None]
    ended: Callable[[], None]


WITHOUT = Mode("without us", nullcontext(), nothing)


def modes(training: Training) -> list[Mode]:
    """All kinds of steps, each ready to be made."""
    found = [WITHOUT]
    for name, (warmup, timed) in PHASES.items():
        for as_run in (False, True):
            recording = recompute_scan.record(1, warmup=warmup, timing_steps=timed)
            recording.begin()
            training.step(recording.step)  # the warm-up of the second kind
            watched = Watched(recording, as_run=as_run)
            call = nothing if as_run else recording.step
            found.append(Mode(f"{'run' if as_run else 'record()'}, {name}", watched, call))
            forget()
    with recompute_scan.record(1, warmup=1, timing_steps=0) as recording:
        while not recording.done:
            training.step(recording.step)
    found.append(Mode("record(), after the last", nullcontext(), recording.step))
    return found


def forget() -> None:
    """Let another recording begin, though this one has not ended."""
    sys.modules["recompute_scan.record.recording"].__dict__["_current"] = None


def measure(training: Training, rounds: int) -> dict[str, list[Pair]]:
    """By mode, the steps of so many pairs of blocks: without us, and with."""
    pairs: dict[str, list[Pair]] = {}
    kinds = modes(training)
    random.seed(0)
    gc.disable()
    for _ in range(rounds):
        for mode in kinds:
            without: list[float] = []
            watched: list[float] = []
            order = [(WITHOUT, without), (mode, watched)]
            random.shuffle(order)
            for one, steps in order:
                with one.inside:
                    took = [training.step(one.ended) for _ in range(SETTLE + STEPS)]
                steps.extend(took[SETTLE:])
            pairs.setdefault(mode.name, []).extend(zip(without, watched, strict=True))
        gc.collect(0)
    gc.enable()
    return pairs


def calls() -> str:
    """What one call of a checkpoint around an empty function takes, without us and with, in us.

    The quickest of many short runs, which is the surest figure on a machine that others use.
    """
    probe, x = Probe(Path.cwd()), torch.zeros(2, requires_grad=True)

    def took(reentrant: bool) -> float:
        began = time.thread_time()
        for _ in range(_CALLS):
            torch.utils.checkpoint.checkpoint(torch.neg, x, use_reentrant=reentrant)
        return 1e6 * (time.thread_time() - began) / _CALLS

    lines = ["| one call | without us | with |", "| --- | ---: | ---: |"]
    for reentrant in (True, False):
        without, watched = [], []
        for _ in range(_RESAMPLES):
            took(reentrant)
            without.append(took(reentrant))
            probe.install()
            took(reentrant)
            watched.append(took(reentrant))
            probe.remove()
        name = "reentrant" if reentrant else "non-reentrant"
        lines.append(f"| checkpoint, {name} | {min(without):.1f} us | {min(watched):.1f} us |")
    for name, (warmup, timed) in PHASES.items():
        with recompute_scan.record(1, warmup=warmup, timing_steps=timed) as recording:
            recording.step()
            steps = [_step_us(recording) for _ in range(_RESAMPLES)]
        lines.append(f"| recording.step(), {name} | | {min(steps):.1f} us |")
    return "\n".join(lines)


def _step_us(recording: Recording) -> float:
    began = time.thread_time()
    for _ in range(_CALLS):
        recording.step()
    return 1e6 * (time.thread_time() - began) / _CALLS


def report(pairs: dict[str, list[Pair]]) -> str:
    """The table."""
    plain = [without for found in pairs.values() for without, _ in found]
    lines = [
        f"A step without us: {tenth(plain):.2f} ms (quickest tenth), "
        f"{statistics.median(plain):.2f} ms (median).",
        "",
        "| steps | quickest tenth | 95 % interval | us a step | median of pairs | 95 % interval |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in pairs.items():
        us = 1e3 * tenth(plain) * (quickest(found) - 1)
        lines.append(f"| {name} | {_row(found, quickest)} | {us:+.0f} | {_row(found, typical)} |")
    return "\n".join(lines)


def tenth(values: Sequence[float]) -> float:
    """The value that a tenth of them stay below."""
    return sorted(values)[len(values) // 10]


def quickest(pairs: Sequence[Pair]) -> float:
    """The quickest tenth with us, as a multiple of that without."""
    return tenth([watched for _, watched in pairs]) / tenth([without for without, _ in pairs])


def typical(pairs: Sequence[Pair]) -> float:
    """The median ratio within pairs."""
    return statistics.median(watched / without for without, watched in pairs)


def _row(pairs: Sequence[Pair], estimate: Callable[[Sequence[Pair]], float]) -> str:
    found = sorted(estimate(random.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    low, high = found[_RESAMPLES // 40], found[-_RESAMPLES // 40 - 1]
    shown = [100 * (value - 1) for value in (estimate(pairs), low, high)]
    return f"{shown[0]:+.2f} % | {shown[1]:+.2f} to {shown[2]:+.2f} %"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    training = Training(asked.width, asked.blocks, asked.rows)
    print(f"{processor()}; {versions(['recompute-scan', 'torch'])}; one thread")
    print(
        f"{asked.blocks} x 3 checkpoints, width {asked.width}, {asked.rows} rows; "
        f"{asked.rounds} pairs of blocks of {STEPS} steps a row"
    )
    print(calls())
    print(f"\n{table()}")
    if asked.rounds:
        print(f"\n{report(measure(training, asked.rounds))}")


if __name__ == "__main__":
    main()
