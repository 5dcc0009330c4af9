"""Gradients without checkpoints, where all of them at once do not fit into memory."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from recompute_scan.report.layout import measured_sentences
from recompute_scan.result import GradientDistance, Gradients, Region, from_json
from recompute_scan.result.fidelity import Sampled
from recompute_scan.verification import Trial, named_regions, without_in_parts, worst_of
from tests.present import present
from tests.record.runs import QUICK, tool
from tests.report import sample_results
from tests.test_verification import STEADY, trial

SEEN = (Sampled("weight", False, 1),)
# Each block without a checkpoint holds a page of memory, and there are two.
SCRIPT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

held = []

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            held.append(1)
            if len(held) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.drop(self.lin(x)).sin()

torch.manual_seed(0)
net = nn.ModuleList([Block() for _ in range(5)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(40):
    torch.manual_seed(step)
    held.clear()
    x = torch.randn(4, 8, requires_grad=True)
    for number, block in enumerate(net):
        x = checkpoint(block, x, use_reentrant=True, preserve_rng_state=number != {dropped})
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def regions(count: int) -> list[Region]:
    (one, *_) = sample_results.doubled().regions
    return [replace(one, module=f"layers.{n}") for n in range(count)]


@pytest.mark.parametrize(("count", "fits", "runs"), [(4, 2, 2), (8, 2, 6), (5, 5, 2), (1, 1, 1)])
def test_parts_are_halved_until_they_fit(count: int, fits: int, runs: int) -> None:
    asked: list[list[str]] = []

    def run(part: Sequence[Region], number: int) -> Trial:
        asked.append([region.module or "" for region in part])
        assert number == len(asked)
        if len(part) > fits:
            return trial(*STEADY, status=137)
        return replace(trial(*STEADY), gradients=SEEN)

    came, taken = without_in_parts(regions(count), run)
    assert len(asked) == runs
    assert taken == count
    assert len(came) == sum(len(part) <= fits for part in asked)
    done = [name for part in asked if len(part) <= fits for name in part]
    assert done == [f"layers.{n}" for n in range(count)]


def test_what_fails_otherwise_is_not_tried_again() -> None:
    def run(part: Sequence[Region], number: int) -> Trial:
        return trial(*STEADY, status=1)

    assert without_in_parts(regions(4), run) == ([], 0)


def test_regions_that_share_a_name_are_left_out() -> None:
    result = sample_results.doubled()
    first, *rest = result.regions
    twice = replace(result, regions=(first, first, *rest))
    assert named_regions(twice) == tuple(rest)


def test_the_worst_of_several_speaks() -> None:
    small, large = GradientDistance("a", False, 0.1), GradientDistance("a", False, 0.5)
    missing = GradientDistance("b", False, None)
    parts = [
        Gradients("equal", compared=3),
        Gradients("different", compared=3, worst=(small, missing)),
        Gradients("different", compared=2, worst=(large,)),
    ]
    assert worst_of(parts) == Gradients("different", compared=3, worst=(missing, large))


@pytest.mark.slow
@pytest.mark.parametrize(("dropped", "status"), [(None, "equal"), (3, "different")])
def test_a_script_that_needs_its_checkpoints_is_compared_in_parts(
    tmp_path: Path, dropped: int | None, status: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(dropped=dropped))
    done = tool(tmp_path, "run", "--verify", *QUICK, "-o", "out", "train.py")
    assert done.returncode == 0, done.stderr
    result = from_json((tmp_path / "out" / "result.json").read_bytes())
    found = present(present(result.verified).gradients)
    assert (found.status, found.in_parts) == (status, 5)
    assert any(
        "several runs each took out some of the checkpoints of 5 blocks" in said
        for said in measured_sentences(result)
    )
    if dropped is not None:
        assert {one.name.partition(".")[0] for one in found.worst} <= {"0", "1", "2", "3"}
