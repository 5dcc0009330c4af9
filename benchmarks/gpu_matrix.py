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

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch
from tests.cases.distributed import leave_group
from tests.cases.gpu_matrix import WAYS, Cell, cells
from tests.cases.truth import write_truth

from benchmarks._frame import benchmark, folder_option, kept_in, some
from benchmarks.accuracy import BACKENDS, Recording, print_table, truth_of


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
