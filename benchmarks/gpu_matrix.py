"""The nesting table on a GPU, with what only a GPU has: the model's count beside the answer.

Each pair of outer and inner checkpoint, with each attention backend, trained plainly, under FSDP1
over NCCL (one process), and as one CUDA graph a step. The model counts its own runs; of a graph, it
counts those that were captured, and each launch runs them again. Each trace is read as it is, and
once more without its operators, so that kernel names alone have to give the same. A cell that
cannot be recorded on a machine is listed with the reason, and is neither right nor wrong.

  python -m benchmarks gpu-matrix --keep traces/gpu
  python -m benchmarks gpu-matrix --device cpu      what of it a CPU can show
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click
import torch
from tests.cases import model as models
from tests.cases.case import Build, Case, TrainingStep
from tests.cases.distributed import leave_group, shard
from tests.cases.loops import batch, next_token_loss, train
from tests.cases.model import NON_REENTRANT, REENTRANT, Checkpoints, Model, Oracle, Variant
from tests.cases.truth import Verdict, write_truth
from torch.utils.checkpoint import checkpoint

from benchmarks._frame import benchmark, folder_option, kept_in, some
from benchmarks.accuracy import BACKENDS, Recording, print_table, truth_of

N, R = NON_REENTRANT, REENTRANT
SHORT = {None: "none", N: "n", R: "r"}


@dataclass(frozen=True)
class Cell:
    """One place of the matrix: a case, how it is trained, and with which attention."""

    case: Case
    way: str
    attention: str

    @property
    def name(self) -> str:
        """Stem of its files."""
        return f"{self.way}.{self.case.name}.{self.attention}"


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
                next_token_loss(model(tokens).float(), tokens).backward()  # type: ignore[no-untyped-call]
                sgd.step()

        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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


def cells(ways: Sequence[str], attention: Sequence[str]) -> Iterator[Cell]:
    """The matrix, pair by pair."""
    for way, backend in itertools.product(ways, attention):
        for outer, inner in itertools.product((None, R, N), repeat=2):
            name = f"{SHORT[inner]}_in_{SHORT[outer]}"
            case = Case(name, "", _verdict(outer, inner), WAYS[way](outer, inner))
            yield Cell(case, way, backend)


def _verdict(outer: Variant | None, inner: Variant | None) -> Verdict:
    """The nesting table: see ``docs/how-it-works.md``."""
    if outer is None and inner is None:
        return "none"
    if outer is None or inner is None or (outer, inner) == (N, N):
        return "full"
    return "doubled"


@benchmark
@click.option("--device", default="cuda", help="cuda, cuda:N, or cpu.")
@some("--way", WAYS, text="How the model is trained.")
@some("--attention", BACKENDS, default=["flash", "efficient", "cudnn"], text="Backends.")
@folder_option("--keep", text="Where traces and truths stay.")
def main(device: str, way: Sequence[str], attention: Sequence[str], keep: Path | None) -> int:
    if device != "cpu" and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here; --device cpu runs the part that needs none")
    if device == "cpu":
        way, attention = [one for one in way if one != "graph"], ["any"]
    failures: dict[str, str] = {}
    with kept_in(keep) as folder:
        recordings = (
            recording
            for cell in cells(way, attention)
            for recording in _record(cell, folder, device, failures)
        )
        tally = print_table(recordings, device)
    leave_group()
    for name, reason in failures.items():
        print(f"not recorded: {name}: {reason}")
    print(f"{len(failures)} cells not recorded")
    return 0 if 0 < tally.right == len(tally.recordings) else 1


def _record(cell: Cell, folder: Path, device: str, failures: dict[str, str]) -> Iterator[Recording]:
    for evidence in ("autograd", "annotated"):
        if cell.way == "graph" and evidence == "annotated":
            continue  # a graph runs no Python that could leave annotations
        trace = folder / f"{cell.name}.{evidence}.json.gz"
        try:
            truth = truth_of(cell.case, trace, cell.attention, evidence, device)
        except Exception as error:
            failures[cell.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            return
        write_truth(folder / f"{cell.name}.truth.json", truth)
        shown = "kernels" if cell.way == "graph" else evidence
        yield Recording(f"{cell.way} {cell.case.name}", cell.attention, shown, trace, truth)
        if device != "cpu" and evidence == "autograd" and cell.way != "graph":
            alone = _without_operators(trace)
            yield Recording(f"{cell.way} {cell.case.name}", cell.attention, "kernels", alone, truth)


def _without_operators(trace: Path) -> Path:
    """The same trace as a recording of device activity alone would leave it."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "cpu_op"]
    alone = trace.with_name(trace.name.replace(".autograd.", ".kernels."))
    alone.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    return alone
