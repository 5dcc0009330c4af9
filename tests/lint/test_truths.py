"""Which pairs of switches double, as counted by running them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", minversion="5.0", reason="the default variant changed in 5.0")

from tests.lint.truths import PAIRS, Recomputes, recomputes

# Two checkpoints around one layer double only where one of them is reentrant, or early stop is
# off: two switches that are both on are not yet a doubling.
DOUBLES = {
    "wrapper around model, reentrant",
    "wrapper, reentrant, around model, default",
    "wrapper, reentrant, around model, reentrant",
    "wrapper around model, default; early stop off",
}
OFF = {"none", "switched on, then off"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", PAIRS)
def test_how_often_a_pair_of_switches_recomputes_each_layer(pair: str) -> None:
    times = 2 if pair in DOUBLES else 0 if pair in OFF else 1
    assert recomputes(*PAIRS[pair]) == Recomputes(times, times)


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.runs = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        found: torch.Tensor = self.outer(self.inner(x).tanh())
        return found


def test_a_part_wrapped_inside_a_checkpointed_layer_runs_twice_again() -> None:
    attention, mlp = _Part(), _Part()

    def layer(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = mlp((x + checkpoint(attention, x, use_reentrant=False)).tanh())
        return found

    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert (attention.runs, mlp.runs) == (3, 2)
