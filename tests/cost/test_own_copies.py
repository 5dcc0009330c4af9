"""A function's own copies go with it, and a block's stay: the nesting of ranges is the truth."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recompute_scan.cost.removal import Context
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import load
from recompute_scan.trace.calls import Calls
from tests.cases.case import Build, Case, TrainingStep, record
from tests.cases.frameworks import Under
from tests.cases.functions import _Offloads, plain, torchs
from tests.cases.model import NON_REENTRANT, REENTRANT, Oracle
from tests.cases.recorded import recorded

COPIES = {"stash": ("HiddenStash", "aten::clone"), "to_host": ("ToHost", "aten::to")}
# Copies for one block in a step: one in each forward pass of the function, one in its node.
COUNTS = {"": 2, "_in_r": 3, "_in_n": 3, "_round_r": 2, "_round_n": 2, "_twice": 5}
BLOCKS, STEPS = 4, 3


def copied(facts: RecomputeFacts) -> list[int]:
    around = Context(facts, int(facts.calls.start.min()), int(facts.calls.end.max()))
    rows: list[int] = around.own_copies.rows.tolist()
    return rows


def directly_in(calls: Calls, function: str, name: str) -> list[int]:
    """Rows of calls of a name right in a function's or its node's range."""
    ranges = (function, f"{function}Backward")
    return [
        row
        for row in range(len(calls))
        if calls.names[calls.name[row]] == name
        and calls.names[calls.name[calls.parent[row]]] in ranges
    ]


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("nesting", COUNTS)
def test_all_copies_of_a_function_are_found_and_no_others(kind: str, nesting: str) -> None:
    trace, _ = recorded(kind + nesting)
    facts = study(load(trace))
    truth = directly_in(facts.calls, *COPIES[kind])
    assert copied(facts) == truth
    assert len(truth) == COUNTS[nesting] * BLOCKS * STEPS


class Masked(nn.Module):
    """A block that copies what it does not learn from before all else."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("mask", torch.ones(8, dtype=torch.float64))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask.clone().to(x.dtype)
        return x + torch.tanh(self.linear(x)) * mask.unsqueeze(-1)


class Notes(nn.Module):
    """A block that keeps its input for itself, outside of autograd."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen = x.clone()
        return x + torch.tanh(self.linear(x))


def blocks_under(checkpoint: Under, kind: type[nn.Module]) -> Build:
    """A step through some blocks of a kind, each in that checkpoint."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        del oracle
        blocks = [checkpoint(kind(16).to(device)) for _ in range(BLOCKS)]

        def step() -> None:
            x = torch.ones(2, 8, 16, requires_grad=True)
            for block in blocks:
                x = block(x)
            x.square().mean().backward()

        return step

    return build


@pytest.mark.parametrize(
    ("checkpoint", "kind", "copies"),
    [
        (plain("Stashes", _Offloads), Masked, 2),
        (torchs(REENTRANT), Notes, 0),
        (torchs(NON_REENTRANT), Notes, 0),
    ],
)
def test_what_a_block_copies_first_is_not_its_functions(
    checkpoint: Under, kind: type[nn.Module], copies: int, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json.gz"
    record(Case("", "", None, blocks_under(checkpoint, kind)), trace)
    facts = study(load(trace))
    found = copied(facts)
    names = [facts.calls.names[facts.calls.name[row]] for row in found]
    assert names == ["aten::clone"] * copies * BLOCKS * STEPS
    sizes = {facts.trace.signatures[code] for code in facts.calls.dims[found].tolist()}
    assert all(size.startswith(("[[2, 8, 16]", "[[2,8,16]")) for size in sizes)
