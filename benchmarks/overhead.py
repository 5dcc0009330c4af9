"""What recording costs steps that are not recorded, and the step that is compared.

One process, one model, one thread. Short blocks of steps go in pairs, one without us and one with,
in random order; the first steps after what is ours was put in or out are not measured. Two
estimates with 95 % intervals: the quickest tenth of the steps with us against that without, which
other work on the machine disturbs least, and the median of the ratios within pairs. Pairs of which
both blocks are without us say what each can tell. The model is the worst case: every block of it is
checkpointed as a whole (reentrant) and in two halves (non-reentrant).

The step in which recomputes are compared takes turns with a plain one, and the least of each
counts. Memory is what torch allocates on the CPU, as its profiler notes it, at the step's highest
point; beside it stands the largest output of a checkpointed region.

  python -m benchmarks overhead --part calls       one call of a checkpoint, one step of the loop
  python -m benchmarks overhead --part compared    the compared step
  python -m benchmarks overhead --part steps --width 16 --rows 8 --blocks 1 --rounds 150
"""

import gc
import itertools
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import numpy as np
import torch
import transformers
from tests.plan.scripts import Mlp
from torch import Tensor, nn

import recompute_scan
from benchmarks._frame import Floats, Table, benchmark, interval, some
from benchmarks._machine import machine
from recompute_scan.record.checkpoint_calls import Probe, install_self_test
from recompute_scan.record.recording import Recording
from recompute_scan.record.steps import StepCounter, StepHooks

_RESAMPLES = 500
_CALLS = 40
# Steps of a block: those that are left out, and those that are measured.
SETTLE, STEPS = 6, 8
# More steps than any benchmark makes: a phase that does not end.
_FOREVER = 10**9
# Warm-up and timed steps of a recording that stays in one phase.
PHASES = {"before": (_FOREVER, 0), "timed": (1, _FOREVER)}


# Of each compared training so many rounds at least, and more of short steps.
_ROUNDS, _LEAST_S = 12, 6.0
PARTS = ("calls", "compared", "steps")


class Block(nn.Module):
    """Two halves, checkpointed each, and together once more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Mlp(width, 2 * width), Mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = torch.utils.checkpoint.checkpoint(self.both, x, use_reentrant=True)
        return whole

    def both(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        again: Tensor = torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=False)
        return again


class Training:
    """A model, its data, and its optimizer."""

    def __init__(self, width: int, blocks: int, rows: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.data = torch.randn(rows, width, requires_grad=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self) -> Tensor:
        """What is made smaller."""
        loss: Tensor = self.model(self.data).square().mean()
        return loss

    def regions(self) -> Iterable[nn.Module]:
        """The modules behind checkpoints."""
        return (one for one in self.model.modules() if isinstance(one, (Block, Mlp)))

    def step(self, ended: Callable[[], None]) -> float:
        """One ordinary step, in ms of the processor; ``ended`` is what the loop calls behind it."""
        began = time.thread_time()
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended()
        return 1e3 * (time.thread_time() - began)


class Llama(Training):
    """A Llama of four layers, with the checkpoints that it brings."""

    def __init__(self, width: int, length: int, *, reentrant: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=width,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=2 * width,
                vocab_size=128,
                use_cache=False,
            )
        ).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        self.data = torch.randint(0, 128, (2, length))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self) -> Tensor:
        """That of predicting its own input."""
        loss: Tensor = self.model(input_ids=self.data, labels=self.data).loss
        return loss

    def regions(self) -> Iterable[nn.Module]:
        """Its layers."""
        layers: Iterable[nn.Module] = self.model.model.layers
        return layers


def nothing() -> None:
    """What a loop without us calls."""


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
        live.graphs.install()
        install_self_test(live.probe)
        live.others.install()
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
        live.others.remove()
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


def measure(training: Training, rounds: int) -> dict[str, Floats]:
    """By mode, the steps of so many pairs of blocks: without us, and with."""
    pairs: dict[str, list[tuple[float, float]]] = {}
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
    return {name: np.array(found) for name, found in pairs.items()}


def calls() -> None:
    """What one call of a checkpoint around an empty function takes, without us and with, in µs.

    The quickest of many short runs, which is the surest figure on a machine that others use.
    """
    probe, x = Probe(Path.cwd()), torch.zeros(2, requires_grad=True)

    def took(reentrant: bool) -> float:
        began = time.thread_time()
        for _ in range(_CALLS):
            torch.utils.checkpoint.checkpoint(torch.neg, x, use_reentrant=reentrant)
        return 1e6 * (time.thread_time() - began) / _CALLS

    table = Table({"one call": "<", "without us, µs": ">.1f", "with, µs": ">.1f"}, markdown=True)
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
        table.row(f"checkpoint, {name}", min(without), min(watched))
    for name, (warmup, timed) in PHASES.items():
        with recompute_scan.record(1, warmup=warmup, timing_steps=timed) as recording:
            recording.step()
            steps = [_step_us(recording) for _ in range(_RESAMPLES)]
        table.row(f"recording.step(), {name}", "", min(steps))


def _step_us(recording: Recording) -> float:
    began = time.thread_time()
    for _ in range(_CALLS):
        recording.step()
    return 1e6 * (time.thread_time() - began) / _CALLS


def report(pairs: dict[str, Floats]) -> None:
    """The table of the steps."""
    plain = np.concatenate(list(pairs.values()))[:, 0]
    print(
        f"A step without us: {_tenth(plain):.2f} ms (quickest tenth), "
        f"{np.median(plain):.2f} ms (median).\n"
    )
    heads = ("quickest tenth", "95 % interval", "µs a step", "median of pairs", "its interval")
    table = Table({"steps": "<", **dict.fromkeys(heads, ">")}, markdown=True)
    for name, found in pairs.items():
        us = 1e3 * _tenth(plain) * (_quickest(found) - 1)
        quickest, typical = (_percent(found, how) for how in (_quickest, _typical))
        table.row(name, *quickest, f"{us:+.0f}", *typical)


def _percent(pairs: Floats, estimate: Callable[[Floats], float]) -> tuple[str, str]:
    low, middle, high = (100 * (value - 1) for value in interval(pairs, estimate))
    return f"{middle:+.2f} %", f"{low:+.2f} to {high:+.2f} %"


def _tenth(values: Floats) -> float:
    """The value that a tenth of them stay below."""
    return float(np.sort(values)[len(values) // 10])


def _quickest(pairs: Floats) -> float:
    """The quickest tenth with us, as a multiple of that without."""
    return _tenth(pairs[:, 1]) / _tenth(pairs[:, 0])


def _typical(pairs: Floats) -> float:
    """The median ratio within pairs."""
    return float(np.median(pairs[:, 1] / pairs[:, 0]))


TRAININGS: dict[str, Callable[[], Training]] = {
    "nested, width 64": lambda: Training(64, 4, 64),
    "nested, width 128": lambda: Training(128, 4, 256),
    "nested, width 512": lambda: Training(512, 2, 512),
    "Llama, width 64": lambda: Llama(64, 64),
    "Llama, width 64, reentrant": lambda: Llama(64, 64, reentrant=True),
    "Llama, width 256": lambda: Llama(256, 128),
    "Llama, width 512": lambda: Llama(512, 256),
}


def compared() -> None:
    """The step in which recomputes are compared: a row for each training."""
    heads = (
        "training < | results > | plain step, ms >.1f | compared >.1f | times >.2f | plain peak, "
        "MiB >.2f | compared, KiB >+.0f | largest output, KiB >.0f"
    )
    table = Table(heads, markdown=True)
    for name, make in TRAININGS.items():
        table.row(name, *_compare(make()))


def _compare(training: Training) -> tuple[float, ...]:
    largest = largest_output(training)
    probe = Probe(Path.cwd())

    def seen(step: Callable[[], float]) -> tuple[float, int]:
        probe.comparison.compare()
        value = step()
        found = probe.comparison.compared()
        return value, sum(region.operators for region in found.regions)

    probe.install()
    try:
        probe.begin()
        training.step(nothing)
        seen(lambda: training.step(nothing))
        plain: list[float] = []
        watched: list[float] = []
        results = 0
        began = time.monotonic()
        while len(plain) < _ROUNDS or time.monotonic() - began < _LEAST_S:
            plain.append(training.step(nothing))
            took, results = seen(lambda: training.step(nothing))
            watched.append(took)
        before = peak(training)
        after, _ = seen(lambda: peak(training))
    finally:
        probe.remove()
    least, most = min(plain), min(watched)
    added = (after - before) / 2**10
    return results, least, most, most / least, before / 2**20, added, largest / 2**10


def peak(training: Training) -> float:
    """What one step allocates at its highest point, in bytes."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        training.step(nothing)
    results: Any = profiler.profiler
    events = [one for one in results.kineto_results.events() if one.name() == "[memory]"]
    changes = sorted((one.start_ns(), one.nbytes()) for one in events)
    return float(max(itertools.accumulate(size for _, size in changes)))


def largest_output(training: Training) -> int:
    """Bytes of the largest tensor that a checkpointed module returns."""
    found = [0]

    def see(_: nn.Module, args: object, result: Any) -> None:
        found.append((result[0] if isinstance(result, tuple) else result).nbytes)

    hooks = [region.register_forward_hook(see) for region in training.regions()]
    training.step(nothing)
    for hook in hooks:
        hook.remove()
    return max(found)


@benchmark
@some("--part", PARTS, text="What is measured.")
@click.option("--width", default=128)
@click.option("--blocks", default=4)
@click.option("--rows", default=256)
@click.option("--rounds", default=100, help="Pairs of blocks for each kind of step.")
def main(part: tuple[str, ...], width: int, blocks: int, rows: int, rounds: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    print(f"{machine('recompute-scan', 'torch', 'transformers')}; one thread\n")
    if "calls" in part:
        calls()
    if "compared" in part:
        compared()
    if "steps" in part:
        print(
            f"\n{blocks} x 3 checkpoints, width {width}, {rows} rows; "
            f"{rounds} pairs of blocks of {STEPS} steps a row"
        )
        report(measure(Training(width, blocks, rows), rounds))
