"""What early stop will leave out of a recompute, against torch leaving it out."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from recompute_scan.cost.removal import Context, Removal
from recompute_scan.cost.reruns import TYPICAL
from recompute_scan.cost.simulate import join, predict, prepare, simulate
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import load
from tests.cases.case import Case, record
from tests.cases.equal import layered
from tests.cases.trees import equal_layers

WIDTH = 16
BLOCKS, STEPS = 2, 3
# They compute nothing, and a trace shows those too that operators make for themselves.
VIEWS = {"aten::detach", "aten::t", "aten::transpose", "aten::view"}
Tail = Callable[[Tensor, Tensor], Tensor]

# How a block ends, given what came in and what it made of it.
TAILS: dict[str, Tail] = {
    "a product and a residual": lambda x, y: x + functional.linear(y, y.mT @ y),
    "gelu": lambda _, y: functional.gelu(y),
    "silu, then a sum and a view": lambda x, y: (x + functional.silu(y)).view(-1),
    "a product of two": lambda x, y: x * y,
    "sigmoid": lambda _, y: torch.sigmoid(y),
    "relu": lambda _, y: torch.relu(y),
    "tanh and a residual": lambda x, y: x + torch.tanh(y),
    "softmax": lambda _, y: torch.softmax(y, -1),
    "layer norm": lambda _, y: functional.layer_norm(y, (WIDTH,)),
    "layer norm, turned": lambda _, y: functional.layer_norm(y, (WIDTH,)).mT.contiguous(),
    "attention": lambda _, y: functional.scaled_dot_product_attention(*3 * (y[None, None],)),
    "sigmoid in place": lambda x, y: x + (y + 1).sigmoid_(),
    "a mean, which saves nothing": lambda x, y: x + torch.exp(y) + y.mean(),
    "exp": lambda _, y: torch.exp(y),
    "division": lambda x, y: x / (y * y + 1),
}


class Block(nn.Module):
    """Two products and a tail; reentrant inside where it is asked for."""

    def __init__(self, tail: Tail, *, doubled: bool) -> None:
        super().__init__()
        self.tail, self.doubled = tail, doubled
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.doubled:
            result: Tensor = checkpoint(self.compute, x, use_reentrant=True)
            return result
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return self.tail(x, self.down(functional.gelu(self.up(x)))).reshape(WIDTH, WIDTH)


class Ran(TorchDispatchMode):
    """Counts the operators that are really computed again: with gradients, in a backward pass.

    An operator that early stop interrupts has a row in a trace, but never comes here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self.names[f"aten::{func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def training(tail: Tail, *, doubled: bool) -> Callable[[], None]:
    """A step of two blocks with a non-reentrant checkpoint around each."""
    blocks = [Block(tail, doubled=doubled) for _ in range(BLOCKS)]
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], 1e-3)

    def step() -> None:
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def recorded(step: Callable[[], None], trace: Path) -> RecomputeFacts:
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(trace)),
    ) as profiler:
        for _ in range(1 + STEPS):
            step()
            profiler.step()
    return study(load(trace))


def left(facts: RecomputeFacts) -> Counter[str]:
    """Calls inside the recomputes, by name, without what goes with the inner checkpoint."""
    calls = facts.calls
    around = Context(facts, facts.steps[0].start, facts.steps[-1].end)
    lengths = lambda rows: calls.duration[rows].astype(float)  # noqa: E731
    edits = join(Removal(around, lambda kinds: kinds[0]).edits(TYPICAL, lengths))
    lost = edits.removed(calls.thread, calls.start)
    return Counter(
        calls.names[calls.name[inner]]
        for recompute in facts.alignment.recomputes
        for row in recompute.again.tolist()
        for inner in range(row, row + int(calls.size[row]) + 1)
        if not lost[inner]
    )


def computed_again(step: Callable[[], None]) -> Counter[str]:
    with Ran() as ran:
        step()
    return Counter({name: times for name, times in ran.names.items() if name not in VIEWS})


@pytest.mark.parametrize("name", TAILS)
def test_the_recompute_that_stays_ends_where_torch_ends_it(name: str, tmp_path: Path) -> None:
    doubled = training(TAILS[name], doubled=True)
    whole = computed_again(doubled)
    expected = computed_again(training(TAILS[name], doubled=False))
    found = left(recorded(doubled, tmp_path / "doubled.json"))
    assert {name: found[name] / STEPS for name in whole} == {name: expected[name] for name in whole}


@pytest.mark.parametrize(
    ("stack", "layer", "early_stop", "seen"),
    [
        # Around other non-reentrant ones: with early stop it does not run the last of them.
        ("N", "NR", False, False),
        ("N", "NR", True, None),
        ("", "NN", False, False),
        # Nothing is left out either way.
        ("", "NR", False, None),
        ("", "NR", True, None),
        ("", "RR", True, None),
    ],
)
def test_whether_recomputes_stop_early_is_seen_where_it_shows(
    stack: str, layer: str, early_stop: bool, seen: bool | None, tmp_path: Path
) -> None:
    tree = equal_layers(3, layer, stack=stack)
    record(Case("", "", None, layered(tree, early_stop=early_stop)), tmp_path / "trace.json.gz")
    facts = study(load(tmp_path / "trace.json.gz"))
    around = Context(facts, facts.steps[0].start, facts.steps[-1].end)
    assert around.early_stop is seen


def test_where_early_stop_does_not_show_the_range_holds_both(tmp_path: Path) -> None:
    tree = equal_layers(3, "NR")
    record(Case("", "", None, layered(tree)), tmp_path / "trace.json.gz")
    facts = study(load(tmp_path / "trace.json.gz"))
    base = prepare(facts, np.zeros(0))
    assert base is not None
    found = predict(base, lambda kinds: kinds[0])
    lengths = lambda rows: facts.calls.duration[rows].astype(float)  # noqa: E731
    removal = Removal(base.around, lambda kinds: kinds[0])
    assert removal.stops_unseen
    hooks = TYPICAL.scaled(base.host_speed)
    early, late = (
        simulate(base.graph, facts, join(removal.edits(hooks, lengths, early_stop=on)))
        for on in (True, False)
    )
    assert not np.array_equal(early, late)
    assert found.doubts["early_stop"] > 0
    for steps in (early, late):
        assert abs(np.median(steps / base.steps) - found.share) <= found.doubt
