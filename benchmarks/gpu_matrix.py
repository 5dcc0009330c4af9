"""Record the nesting table on a GPU, with what only a GPU has, and check it against the oracle.

    python benchmarks/gpu_matrix.py --keep traces/gpu        on a machine with an NVIDIA GPU
    python benchmarks/gpu_matrix.py --device cpu             what of it a CPU can show

Each pair of outer and inner checkpoint, with each attention backend, trained plainly, under
FSDP1 over NCCL (one process), and as one CUDA graph a step. The model counts its own runs; of a
graph, it counts those that were captured, and each launch runs them again. Each trace is read as
it is, and once more without its operators, so that kernel names alone have to give the same.

A cell that cannot be recorded on this machine (a backend without support for it, FSDP in a graph)
is listed with the reason, and is neither right nor wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import BACKENDS, Recording, only, print_table
from tests.cases import model as models
from tests.cases.case import Build, Case, TrainingStep, record
from tests.cases.distributed import leave_group, shard
from tests.cases.loops import batch, next_token_loss, train
from tests.cases.marked import annotating
from tests.cases.model import NON_REENTRANT, REENTRANT, Checkpoints, Model, Oracle, Variant
from tests.cases.truth import Truth, Verdict, write_truth

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and what could not be recorded; the status is 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    parser.add_argument("--way", nargs="*", choices=WAYS)
    parser.add_argument("--attention", nargs="*", choices=BACKENDS)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave traces and truths here")
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs the part that needs none")
    ways = options.way or (list(WAYS) if on_gpu else ["plain", "fsdp1"])
    attention = options.attention or (["flash", "efficient", "cudnn"] if on_gpu else ["any"])
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        recordings = (
            recording
            for cell in cells(ways, attention)
            for recording in _record(cell, folder, options.device, failures)
        )
        tally = print_table(recordings, options.device)
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
            truth = _truth(cell, trace, device, marked=evidence == "annotated")
        except Exception as error:
            failures[cell.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            return
        write_truth(folder / f"{cell.name}.truth.json", truth)
        shown = "kernels" if cell.way == "graph" else evidence
        yield Recording(f"{cell.way} {cell.case.name}", cell.attention, shown, trace, truth)
        if device != "cpu" and evidence == "autograd" and cell.way != "graph":
            alone = _without_operators(trace)
            yield Recording(f"{cell.way} {cell.case.name}", cell.attention, "kernels", alone, truth)


def _truth(cell: Cell, trace: Path, device: str, marked: bool) -> Truth:
    with (
        only(BACKENDS[cell.attention]),
        annotating() if marked else contextlib.nullcontext(),
    ):
        return record(cell.case, trace, device)


def _without_operators(trace: Path) -> Path:
    """The same trace as a recording of device activity alone would leave it."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "cpu_op"]
    alone = trace.with_name(trace.name.replace(".autograd.", ".kernels."))
    alone.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    return alone


if __name__ == "__main__":
    sys.exit(main())
