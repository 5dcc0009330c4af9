"""What the step costs in which recomputes are compared with their forward: time and memory.

    python benchmarks/compared_step.py

One process, one thread. Plain and compared steps take turns, and the least of each counts: the time
of the processor, so that little of what else the machine does falls on either. Memory is what torch
allocates on the CPU, as its profiler notes it, at the step's highest point; beside it stands the
largest output of a checkpointed region.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from recompute_scan.record.probe import Probe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import processor, versions
from benchmarks.nested_training import Training, nothing

# At least so many of each, and more of short steps, whose least is found later.
_ROUNDS, _LEAST_S = 12, 6.0


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


TRAININGS: dict[str, Callable[[], Training]] = {
    "nested, width 64": lambda: Training(64, 4, 64),
    "nested, width 128": lambda: Training(128, 4, 256),
    "nested, width 512": lambda: Training(512, 2, 512),
    "Llama, width 64": lambda: Llama(64, 64),
    "Llama, width 64, reentrant": lambda: Llama(64, 64, reentrant=True),
    "Llama, width 256": lambda: Llama(256, 128),
    "Llama, width 512": lambda: Llama(512, 256),
}


def measure(name: str) -> str:
    """A row of the table."""
    training = TRAININGS[name]()
    largest = largest_output(training)
    probe = Probe(Path.cwd())

    def compared(step: Callable[[], float]) -> tuple[float, int]:
        probe.comparison.compare()
        value = step()
        found = probe.comparison.compared()
        return value, sum(region.operators for region in found.regions)

    probe.install()
    try:
        probe.begin()
        training.step(nothing)
        compared(lambda: training.step(nothing))
        plain: list[float] = []
        seen: list[float] = []
        results = 0
        began = time.monotonic()
        while len(plain) < _ROUNDS or time.monotonic() - began < _LEAST_S:
            plain.append(training.step(nothing))
            took, results = compared(lambda: training.step(nothing))
            seen.append(took)
        before = peak(training)
        after, _ = compared(lambda: peak(training))
    finally:
        probe.remove()
    least, most = min(plain), min(seen)
    return (
        f"| {name} | {results} | {least:.1f} ms | {most:.1f} ms | {most / least:.2f} | "
        f"{before / 2**20:.2f} MiB | {(after - before) / 2**10:+.0f} KiB | "
        f"{largest / 2**10:.0f} KiB |"
    )


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


def table() -> str:
    """A row for each training."""
    lines = [
        "| training | results | plain step | compared | times | "
        "plain peak | compared | largest output |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*lines, *map(measure, TRAININGS)])


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    print(f"{processor()}; {versions(['recompute-scan', 'torch', 'transformers'])}; one thread")
    print(table())


if __name__ == "__main__":
    main()
