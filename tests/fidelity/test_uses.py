"""While a step is compared, torch refuses and compiles what it would without us."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.record.checkpoint_calls import Probe


@contextmanager
def compared() -> Iterator[None]:
    """The body is a step that is compared."""
    probe = Probe(Path.cwd())
    probe.install()
    try:
        probe.begin()
        probe.comparison.compare()
        yield
        assert any(region.recomputes for region in probe.comparison.compared().regions)
    finally:
        probe.remove()


class Overwritten(nn.Module):
    """Writes what its backward pass needs, which torch refuses there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid().mul_(2)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="torch lets nobody look at what is saved but by hooks, behind which it sees nothing",
)
def test_torch_refuses_what_was_written_in_place_as_ever() -> None:
    with compared():
        x = torch.randn(4, requires_grad=True)
        loss = checkpoint(Overwritten(), x, use_reentrant=True).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.skipif(
    not hasattr(torch.utils._python_dispatch.TorchDispatchMode, "ignore_compile_internals"),
    reason="here torch compiles nothing that a dispatch mode sees",
)
def test_what_is_first_called_in_that_step_is_compiled_as_ever() -> None:
    graphs = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(lambda y: y.sin().mul(2).cos(), backend=backend)
    x = torch.randn(4, requires_grad=True)
    with compared():
        checkpoint(run, x, use_reentrant=False).sum().backward()
        assert len(graphs) == 1
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert len(graphs) == 1
    torch._dynamo.reset()
