"""On a machine with a GPU: is every answer right, how near do figures come, what does it take.

Four stages of programs, each ended at its limit: whether it works at all, the reported case at its
true size, how near the figures come, and traces of all kinds beside their truths. Answers are held
against what the programs count and time by themselves, and are in `results.jsonl` at once.

  python -m benchmarks gpu --keep FOLDER                all of it, about 20 minutes on an H100
  python -m benchmarks gpu --stage 2 --minutes 5 run    items named so, for so long
  python -m benchmarks gpu --tiny --device cpu          sizes for a CPU
  python -m benchmarks gpu --read FOLDER                each trace again, beside its truth

`stages.yaml` says what is run. The status is 1 where an answer is wrong or a program failed.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from benchmarks._frame import benchmark, folder_option, kept_in, wanted, words
from benchmarks.gpu.answers import read_back
from benchmarks.gpu.runner import command, items, run_all


@benchmark
@words()
@click.option("--stage", "stages", multiple=True, type=click.IntRange(1, 4), help="Not all.")
@click.option("--minutes", default=60.0, help="When what is left is not run.")
@click.option("--jobs", default=5, help="Items side by side, where time is no matter.")
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--tiny", is_flag=True, help="Sizes for a CPU.")
@folder_option("--keep", text="Where results, traces and truths stay.")
@folder_option("--read", text="Run nothing: show what is in such a folder.")
def main(
    words: Sequence[str],
    stages: Sequence[int],
    minutes: float,
    jobs: int,
    device: str,
    tiny: bool,
    keep: Path | None,
    read: Path | None,
) -> int:
    if read is not None:
        return read_back(read)
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here; --tiny --device cpu runs the small form")
    with kept_in(keep) as folder:
        chosen = [one for one in items(device, stages) if wanted(one["name"], words)]
        made = functools.partial(command, keep=folder.resolve(), device=device, tiny=tiny)
        return run_all(chosen, folder, made, minutes, jobs)
