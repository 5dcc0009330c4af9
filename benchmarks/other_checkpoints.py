"""Checkpoint functions of other libraries, held against the oracle like those of ``tests/cases``.

    pip install --no-deps --no-build-isolation --target /tmp/other fairscale
    rm -r /tmp/other/benchmarks  # a stray package, in the way of this folder
    PYTHONPATH=/tmp/other python benchmarks/other_checkpoints.py

fairscale's ``checkpoint_wrapper`` replaces a module's ``forward`` and has an autograd function of
its own that is called like torch's.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import Recording, print_table
from tests.cases.case import Build, Case, TrainingStep, record
from tests.cases.loops import batch, next_token_loss
from tests.cases.marked import marks
from tests.cases.model import NON_REENTRANT, REENTRANT, Checkpoints, Model, Oracle, Variant


def fairscale(inner: Variant | None = None, twice: bool = False) -> Build:
    """fairscale's wrapper round each layer, round torch's own checkpoint, or twice."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        wrap = importlib.import_module("fairscale.nn.checkpoint").checkpoint_wrapper
        model = Model(oracle, Checkpoints(inner=inner)).to(device)
        layers = [wrap(layer) for layer in model.layers]
        model.layers = nn.ModuleList([wrap(layer) for layer in layers] if twice else layers)
        adamw = torch.optim.AdamW(model.parameters())
        tokens = batch(device)

        def step() -> None:
            next_token_loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
            adamw.step()
            adamw.zero_grad()

        return step

    return build


CASES = (
    Case("fairscale", "fairscale's wrapper round each layer.", "full", fairscale()),
    Case("fairscale_r", "Round torch's reentrant one.", "doubled", fairscale(REENTRANT)),
    Case("fairscale_n", "Round torch's other one.", "doubled", fairscale(NON_REENTRANT)),
    Case(
        "fairscale_twice",
        "Round itself: the model counts one replay.",
        "full",
        fairscale(twice=True),
    ),
)


def main() -> int:
    """Print the table; the status is 1 when an answer is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        right, total = print_table(_recordings(Path(folder)), "cpu")
    return 0 if right == total else 1


def _recordings(folder: Path) -> Iterator[Recording]:
    for case in CASES:
        for evidence in ("autograd", "annotated"):
            trace = folder / f"{case.name}.{evidence}.json.gz"
            with marks() if evidence == "annotated" else contextlib.nullcontext():
                truth = record(case, trace)
            yield Recording(case.name, "any", evidence, trace, truth)


if __name__ == "__main__":
    sys.exit(main())
