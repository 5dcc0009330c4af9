"""What it takes to keep the random state for a recompute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

_ROUNDS = 30


def cost_of_keeping() -> float:
    """Time of the host, in µs, for one checkpointed call and its recompute: the least of several.

    A checkpoint reads the state in the forward; for the recompute it reads the present one, puts
    the forward's in place and in the end the present one back (``torch.utils.checkpoint``,
    ``torch.random.fork_rng``), of the CPU and of the GPU that is used. This does the same with
    generators of its own, so that the script's are left alone; what torch does around that in
    Python comes on top.
    """
    generators = [torch.Generator()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.Generator(f"cuda:{torch.cuda.current_device()}"))
    return 1e6 * min(_once(generators) for _ in range(_ROUNDS))


def _once(generators: Sequence[torch.Generator]) -> float:
    began = time.perf_counter()
    states = [_read(one) for one in generators]
    with ExitStack() as forks:
        for generator, state in zip(generators, states, strict=True):
            forks.enter_context(_forked(generator))
            _put(generator, state)
    return time.perf_counter() - began


@contextmanager
def _forked(generator: torch.Generator) -> Iterator[None]:
    state = _read(generator)
    try:
        yield
    finally:
        _put(generator, state)


def _read(generator: torch.Generator) -> torch.Tensor:
    if generator.device.type == "cpu":
        return generator.get_state()
    with torch.cuda.device(generator.device):
        return generator.get_state()


def _put(generator: torch.Generator, state: torch.Tensor) -> None:
    if generator.device.type == "cpu":
        generator.set_state(state)
    else:
        with torch.cuda.device(generator.device):
            generator.set_state(state)
