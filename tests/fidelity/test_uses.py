"""Looking at what a recompute's nodes have saved leaves them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.record.probe import Probe


class Overwritten(nn.Module):
    """Writes what its backward pass needs, which torch refuses there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid().mul_(2)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="torch lets nobody look at what is saved but by hooks, behind which it sees nothing",
)
def test_torch_refuses_what_was_written_in_place_as_ever() -> None:
    probe = Probe(Path.cwd())
    probe.install()
    try:
        probe.begin()
        probe.comparison.compare()
        x = torch.randn(4, requires_grad=True)
        loss = checkpoint(Overwritten(), x, use_reentrant=True).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        probe.comparison.compared()
    finally:
        probe.remove()
