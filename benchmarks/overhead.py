"""What recording costs steps that are not recorded, and the step that is compared.

One process, one model, one thread. Short blocks of steps go in pairs, one without us and one with,
and every other pair the other way round; the first steps after a recording began or ended are not
measured. Two estimates with 95 % intervals: the quickest tenth of the steps with us against that
without, which other work on the machine disturbs least, and the median of the ratios within pairs.
Pairs of which both blocks are without us say what each can tell. The model is the worst case: every
block of it is checkpointed as a whole (reentrant) and in two halves (non-reentrant).

The step in which recomputes are compared takes turns with a plain one, and the least of each
counts. Memory is what torch allocates on the CPU, as its profiler notes it, at the step's highest
point; beside it stands the largest output of a checkpointed region.

  python -m benchmarks overhead --part calls       one call of a checkpoint, one step of the loop
  python -m benchmarks overhead --part compared    the compared step
  python -m benchmarks overhead --part watched     the step that `run --work` watches
  python -m benchmarks overhead --part steps --rounds 10
"""

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import click
import numpy as np
import torch
import transformers
from tests.plan.scripts import Mlp
from tests.work.test_work import watch_of
from torch import Tensor, nn

import recompute_scan
from benchmarks._frame import Floats, Table, benchmark, in_turn, interval, some
from benchmarks._machine import machine
from benchmarks.earn import true_peak
from recompute_scan.fidelity.operators import SeeingMode
from recompute_scan.record.isolation import Guard
from recompute_scan.record.recording import Recording
from recompute_scan.record.steps import Plan

# What the loop calls behind a step, and what puts a recording in and takes it out again.
Ended = Callable[[], object]
Way = Callable[[], AbstractContextManager[Ended]]

# Calls of one short run.
_CALLS = 40
# Steps of a block: those that are left out, and those that are measured.
_SETTLE, _STEPS = 6, 8
# More steps than any benchmark makes: a phase that does not end.
_FOREVER = 10**9
# One step of warm-up, and the compared one.
_COMPARED = Plan(warmup=1, timing=0, steps=0, fidelity=True)


def nothing() -> None:
    """What a loop without us calls."""


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
    """A model with its loss, and its optimizer.

    Args:
        output_bytes: Size of a hidden state, which is all that a checkpointed region returns.
    """

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], output_bytes: int) -> None:
        self._loss = loss
        self.output_bytes = output_bytes
        self._optimizer = torch.optim.AdamW(model.parameters())

    def step(self, ended: Ended = nothing) -> float:
        """One ordinary step, in ms of the processor."""
        began = time.thread_time()
        self._loss().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        ended()
        return 1e3 * (time.thread_time() - began)

    def compared_step(self) -> tuple[float, int]:
        """One whose recomputes are compared: its ms likewise, and how many results were."""
        with Recording(_COMPARED, "cpu", None) as recording:
            self.step(recording.step)
            took = self.step()
        assert recording.info is not None and recording.info.fidelity is not None
        return took, sum(region.operators for region in recording.info.fidelity.regions)


def nested(width: int, blocks: int, rows: int) -> Training:
    """The worst case."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    data = torch.randn(rows, width, requires_grad=True)
    return Training(model, lambda: model(data).square().mean(), data.nbytes)


def llama(width: int, length: int, *, reentrant: bool = False) -> Training:
    """A Llama of four layers, with the checkpoints that it brings."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * width,
        vocab_size=128,
        use_cache=False,
    )
    model: Any = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    data = torch.randint(0, 128, (2, length))
    output_bytes = data.numel() * width * torch.float32.itemsize
    return Training(model, lambda: model(input_ids=data, labels=data).loss, output_bytes)


TRAININGS: dict[str, Callable[[], Training]] = {
    "nested, width 64": lambda: nested(64, 4, 64),
    "nested, width 128": lambda: nested(128, 4, 256),
    "nested, width 512": lambda: nested(512, 2, 512),
    "Llama, width 64": lambda: llama(64, 64),
    "Llama, width 64, reentrant": lambda: llama(64, 64, reentrant=True),
    "Llama, width 256": lambda: llama(256, 128),
    "Llama, width 512": lambda: llama(512, 256),
}


@contextmanager
def recorded(warmup: int, timed: int, *, as_run: bool = False) -> Iterator[Ended]:
    """A recording that stays in one phase.

    Args:
        as_run: Whether the optimizer's steps are watched, as ``recompute-scan run`` does: then the
            loop calls nothing.
    """
    recording = recompute_scan.record(1, warmup=warmup, timing_steps=timed)
    recording.begin(in_cell=as_run)
    yield nothing if as_run else recording.step
    recording.end()


def without() -> AbstractContextManager[Ended]:
    """No recording."""
    return nullcontext(nothing)


BEFORE, TIMED = partial(recorded, _FOREVER, 0), partial(recorded, 1, _FOREVER)


def paired(
    ways: Mapping[str, Way], block: Callable[[Ended], list[float]], rounds: int
) -> dict[str, Floats]:
    """For each way, pairs of what a block measures: without us, and in that way."""
    took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    blocks: list[tuple[list[float], Way]] = []
    for name, way in ways.items():
        plain, watched = took[name]
        blocks += [(plain, without), (watched, way)]
    for kept, way in in_turn(blocks, rounds):
        gc.collect(0)  # what the recording before has left
        with way() as ended:
            kept.extend(block(ended))
    return {name: np.array(pair).T for name, pair in took.items()}


def calls(rounds: int) -> None:
    """What one call of a checkpoint around an empty function takes, without us and with, in µs.

    The quickest of many short runs, which is the surest figure on a machine that others use.
    """
    runs = 5 * rounds
    x = torch.zeros(2, requires_grad=True)
    table = Table("one call < | without us, µs >.1f | with, µs >.1f", markdown=True)
    for name, reentrant in (("reentrant", True), ("non-reentrant", False)):
        call = partial(torch.utils.checkpoint.checkpoint, torch.neg, x, use_reentrant=reentrant)
        settled = partial(_settled_us, call)
        table.row(f"checkpoint, {name}", *paired({name: BEFORE}, settled, runs)[name].min(axis=0))
    for name, way in (("before", BEFORE), ("timed", TIMED)):
        with way() as step:
            step()
            table.row(f"recording.step(), {name}", "", min(_run_us(step) for _ in range(runs)))


def _settled_us(call: Callable[[], object], _: Ended) -> list[float]:
    _run_us(call)  # the first run after a recording began or ended is not measured
    return [_run_us(call)]


def _run_us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(_CALLS):
        call()
    return 1e6 * (time.thread_time() - began) / _CALLS


def compared(rounds: int) -> None:
    """The step in which recomputes are compared: a row for each training."""
    heads = (
        "training < | results > | plain step, ms >.1f | compared >.1f | times >.2f | plain peak, "
        "MiB >.2f | compared, KiB >+.0f | largest output, KiB >.0f"
    )
    table = Table(heads, markdown=True)
    for name, make in TRAININGS.items():
        training = make()
        peak = true_peak(training.step)
        # With its warm-up step, whose peak is a plain one's.
        added = (true_peak(training.compared_step) - peak) / 2**10
        turns = [(training.step(), *training.compared_step()) for _ in range(1 + rounds // 4)]
        plain, watched, results = map(min, zip(*turns, strict=True))
        times, largest = watched / plain, training.output_bytes / 2**10
        table.row(name, results, plain, watched, times, peak / 2**20, added, largest)


class _Counts(SeeingMode):  # type: ignore[no-untyped-call]
    """Lets each call of an operator through."""

    calls = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def watched(rounds: int) -> None:
    """The watched step: a row for each training, in µs a call of an operator."""
    heads = (
        "training < | calls > | plain >.1f | counted >.1f | watched >.1f | times a plain step >.2f"
    )
    table = Table(heads, markdown=True)
    for name, make in TRAININGS.items():
        training, turns = make(), list[tuple[float, ...]]()
        for _ in range(2 + rounds // 4):
            plain, watch = training.step(), watch_of(Guard())
            with _Counts() as mode:  # type: ignore[no-untyped-call]
                counted = training.step()
            watch.begin()
            turns.append((plain, counted, training.step()))
            watch.next_step()
            watch.end()
        least = [1e3 * one / mode.calls for one in map(min, zip(*turns, strict=True))]
        table.row(name, mode.calls, *least, least[2] / least[0])


def steps(rounds: int) -> None:
    """Whole steps: a row for each way to record."""
    training = nested(128, 4, 256)
    with recompute_scan.record(1, warmup=1, timing_steps=0) as over:
        while not over.done:
            training.step(over.step)
    ways: dict[str, Way] = {
        "without us": without,
        "record(), before": BEFORE,
        "run, before": partial(BEFORE, as_run=True),
        "record(), timed": TIMED,
        "run, timed": partial(TIMED, as_run=True),
        "record(), after the last": lambda: nullcontext(over.step),
    }

    def block(ended: Ended) -> list[float]:
        return [training.step(ended) for _ in range(_SETTLE + _STEPS)][_SETTLE:]

    gc.disable()  # whichever step it fell on would be the slower one
    pairs = paired(ways, block, rounds)
    plain = np.concatenate(list(pairs.values()))[:, 0]
    print(
        f"{rounds} pairs of blocks of {_STEPS} steps a row. A step without us: "
        f"{_tenth(plain):.2f} ms (quickest tenth), {np.median(plain):.2f} ms (median).\n"
    )
    heads = "steps < | quickest tenth > | 95 % interval > | median of pairs > | its interval >"
    table = Table(heads, markdown=True)
    for name, found in pairs.items():
        table.row(name, *_percent(found, _quickest), *_percent(found, _typical))


def _percent(pairs: Floats, estimate: Callable[[Floats], float]) -> tuple[str, str]:
    low, middle, high = (100 * (value - 1) for value in interval(pairs, estimate))
    return f"{middle:+.2f} %", f"{low:+.2f} to {high:+.2f} %"


def _tenth(values: Floats) -> float:
    """The value that a tenth of them stay below."""
    return float(np.quantile(values, 0.1))


def _quickest(pairs: Floats) -> float:
    """The quickest tenth with us, as a multiple of that without."""
    return _tenth(pairs[:, 1]) / _tenth(pairs[:, 0])


def _typical(pairs: Floats) -> float:
    """The median ratio within pairs."""
    return float(np.median(pairs[:, 1] / pairs[:, 0]))


PARTS = {"calls": calls, "compared": compared, "watched": watched, "steps": steps}


@benchmark
@some("--part", PARTS, text="What is measured.")
@click.option(
    "--rounds",
    default=100,
    help="Pairs of blocks for each kind of step; five times as many runs of a call, and a quarter "
    "as many compared steps.",
)
def main(part: tuple[str, ...], rounds: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    print(f"{machine('recompute-scan', 'torch', 'transformers')}; one thread")
    for name in part:
        print()
        PARTS[name](rounds)
