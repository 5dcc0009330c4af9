"""Checkpoints nested at random around small equal layers: the count of each part is the truth.

Each part counts its own runs; the program sees the trace alone. With early stop on the nesting is
any; with early stop off it is any of up to two checkpoints around one part, alike for all layers.
(With more, traces of torch since 2.13 can have two readings.)
"""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import set_checkpoint_early_stop

from recompute_scan import trace as traces
from recompute_scan.recompute.study import RecomputeFacts, study
from tests.cases.trees import Tree, equal_layers, random_tree, run_tree, shown

STEPS = 2


class Part(nn.Module):
    """Half a layer: one linear operator, by which it is found again in the trace."""

    def __init__(self, runs: Counter[tuple[int, bool]], number: int) -> None:
        super().__init__()
        self.runs = runs
        self.number = number
        self.norm = nn.LayerNorm(8) if number % 2 == 0 else nn.Identity()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        self.runs[self.number, torch._C._current_graph_task_id() != -1] += 1
        return x + torch.tanh(y)


def train(tree: Tree, parts: int, early_stop: bool, micro_batches: int, trace: Path) -> list[float]:
    """Recomputes of each part per forward run; the trace of two steps is written."""
    torch.manual_seed(0)
    runs: Counter[tuple[int, bool]] = Counter()
    model = nn.ModuleList([Part(runs, number) for number in range(parts)])
    ends = nn.ModuleList([nn.Embedding(5, 8), nn.Linear(8, 5)])
    sgd = torch.optim.SGD([*model.parameters(), *ends.parameters()], lr=0.01)
    tokens = torch.randint(0, 5, (2, 4))

    def step() -> None:
        for _ in range(micro_batches):
            with set_checkpoint_early_stop(early_stop):
                x = run_tree(tree, list(model), ends[0](tokens))
            ends[1](x).square().mean().backward()
        sgd.step()
        sgd.zero_grad()

    step()
    runs.clear()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            step()
    profiler.export_chrome_trace(str(trace))
    return [runs[number, True] / runs[number, False] for number in range(parts)]


def counted(facts: RecomputeFacts, parts: int) -> list[list[float]]:
    """Recomputes of each part, a list per forward pass."""
    counts = facts.counts
    names = [facts.calls.names[facts.calls.name[row]] for row in counts.rows]
    linear = [
        float(counts.m[at])
        for at, name in enumerate(names)
        if name == "aten::linear" and counts.counted[at]
    ]
    per_pass = parts + 1  # the last is the head
    return [linear[at : at + parts] for at in range(0, len(linear), per_pass)]


def any_nesting(random: Random) -> tuple[Tree, int]:
    parts = 2 * random.randint(1, 6)
    layers: list[Tree] = [(2 * at, 2 * at + 1) for at in range(parts // 2)]
    pieces = layers if random.random() < 0.5 else list(range(parts))
    return random_tree(random, pieces, random.randint(1, 5)), parts


def alike(random: Random) -> tuple[Tree, int]:
    layers = random.randint(1, 8)
    layer, stack, first, second = "", "", "", ""
    for _ in range(random.randint(1, 2)):
        kind, where = random.choice("NR"), random.randint(0, 3)
        if where == 0:
            stack += kind
        elif where == 1:
            first, second = first + kind, second + random.choice(["", kind])
        else:
            layer += kind
    return equal_layers(layers, layer, stack, (first, second)), 2 * layers


def check(random: Random, early_stop: bool, trace: Path) -> None:
    tree, parts = any_nesting(random) if early_stop else alike(random)
    micro_batches = random.choice([1, 1, 2])
    truth = train(tree, parts, early_stop, micro_batches, trace)
    found = counted(study(traces.load(trace)), parts)
    assert found == [truth] * (STEPS * micro_batches), shown(tree)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_part_has_its_own_count(early_stop: bool, seed: int, tmp_path: Path) -> None:
    check(Random(seed), early_stop, tmp_path / "trace.json")
