"""Run an example unchanged, and count how often its layers run in the backward pass.

    python counted_example.py doubled|repaired [--spawn N] [--port P]

The count is made in the ``forward`` of each layer's MLP, without the tool, and left in
``truth-rank<R>.json``: forward runs, and those inside a backward pass. The example takes its rank
from torchrun's environment variables; where Open MPI or Slurm started it, or where this script
starts N ranks itself, they are set here first.
"""

import argparse
import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn
from transformers.models.llama.modeling_llama import LlamaMLP

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Rank and number of ranks, as Open MPI and Slurm say them.
OTHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
SMALL = ("--steps", "1000", "--batch-size", "1", "--sequence-length", "32")


def train(example: str) -> None:
    """Run the example as ``__main__`` until it ends or is ended."""
    runs = {"forward": 0, "in_backward": 0}
    # Not the layer's own: transformers 5.23 no longer checkpoints a layer whose `forward` was
    # replaced (`GradientCheckpointingLayer`).
    forward: Any = LlamaMLP.forward

    @functools.wraps(forward)
    def counted(*args: Any, **options: Any) -> Any:
        backward = torch._C._current_graph_task_id() != -1
        runs["in_backward" if backward else "forward"] += 1
        return forward(*args, **options)

    LlamaMLP.forward = counted  # type: ignore[method-assign]
    script = EXAMPLES / f"{example}_llama_fsdp.py"
    sys.argv = [str(script), *SMALL]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        Path(f"truth-rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(runs))


def join(rank: str, world_size: str, port: int) -> None:
    """Say who this process is, as torchrun would."""
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def in_process(index: int, options: argparse.Namespace) -> None:
    join(str(index), str(options.spawn), options.port)
    train(options.example)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run an example, and count by its side.")
    parser.add_argument("example", choices=["doubled", "repaired"])
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--local_rank", "--local-rank", type=int, help="given by deepspeed")
    options = parser.parse_args()
    if options.spawn:
        spawn(in_process, (options,), nprocs=options.spawn)
        return
    for rank, world_size in OTHERS:
        if rank in os.environ and "RANK" not in os.environ:
            join(os.environ[rank], os.environ[world_size], options.port)
    train(options.example)


if __name__ == "__main__":
    main()
