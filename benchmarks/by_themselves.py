"""Models whose own switch for checkpointing puts two checkpoints around one layer.

Each is made from a config, small, switched on by one call and trained for a few steps. Hooks count
how often each of its layers runs in a step: once without checkpoints, twice with one, three times
with two. Beside that stands the answer. Without diffusers only transformers' model is tried.

  pip install --no-deps --target /tmp/diffusers diffusers==0.42.1
  PYTHONPATH=/tmp/diffusers python -m benchmarks by-themselves

The status is 1 where an answer is not what was counted.
"""

import importlib.metadata

from tests.cases.by_themselves import MODELS, tried

from benchmarks._frame import Table, benchmark


@benchmark
def main() -> int:
    wrong = False
    heads = {"model": "<34", "package": "<22", "layers run, times a step": "<28", "answer": "<"}
    table = Table(heads)
    for name, (package, make) in MODELS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            table.row(name, package, "not installed", "")
            continue
        counted, verdict, often = tried(make)
        wrong |= max(counted) - 1 != often
        told = ", ".join(f"{number} x {times:g}" for times, number in sorted(counted.items()))
        table.row(name, f"{package} {version}", told, f"{verdict} {often:g}")
    return int(wrong)
