"""The nesting table as a GPU runs it: plainly, under FSDP1, and as one CUDA graph a step."""

import functools
import itertools
from collections.abc import Callable
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from tests.cases import model as models
from tests.cases.case import Build, Case, TrainingStep
from tests.cases.distributed import shard
from tests.cases.loops import batch, next_token_loss, train
from tests.cases.model import NON_REENTRANT, REENTRANT, Checkpoints, Model, Oracle, Variant
from tests.cases.truth import Verdict

N, R = NON_REENTRANT, REENTRANT
SHORT = {None: "none", N: "n", R: "r"}


def captured(asked: Checkpoints) -> Build:
    """The whole step as one CUDA graph: forward, backward and update."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, asked).to(device, torch.bfloat16)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        tokens = batch(device)
        # The state of the random numbers cannot be read while a graph is captured.
        without_state = functools.partial(checkpoint, preserve_rng_state=False)

        def eager() -> None:
            with mock.patch.object(models, "checkpoint", without_state):
                sgd.zero_grad(set_to_none=False)
                next_token_loss(model(tokens).float(), tokens).backward()
                sgd.step()

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                eager()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        oracle.reset()
        with torch.cuda.graph(graph):
            eager()
        counted = oracle.entries.copy()

        def step() -> None:
            graph.replay()
            oracle.entries.update(counted)

        return step

    return build


WAYS: dict[str, Callable[[Variant | None, Variant | None], Build]] = {
    "plain": lambda outer, inner: train(Checkpoints(outer=outer, inner=inner), autocast=True),
    "fsdp1": lambda outer, inner: shard(
        "fsdp1", Checkpoints(inner=inner), wrapper=outer, mixed=True
    ),
    "graph": lambda outer, inner: captured(Checkpoints(outer=outer, inner=inner)),
}


def _verdict(outer: Variant | None, inner: Variant | None) -> Verdict:
    """The nesting table: see ``docs/how-it-works.md``."""
    if outer is None and inner is None:
        return "none"
    if outer is None or inner is None or (outer, inner) == (N, N):
        return "full"
    return "doubled"


GPU = {
    f"gpu-{way}": tuple(
        Case(
            f"{way}_{SHORT[inner]}_in_{SHORT[outer]}",
            "",
            _verdict(outer, inner),
            make(outer, inner),
        )
        for outer, inner in itertools.product((None, R, N), repeat=2)
    )
    for way, make in WAYS.items()
}
# No CPU has graphs.
GRAPHS = frozenset(case.name for case in GPU["gpu-graph"])
