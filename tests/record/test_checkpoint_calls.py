"""The wrappers give each checkpoint call a region, whatever that region does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from recompute_scan.record.attribution import CallSites
from recompute_scan.record.checkpoint_calls import CheckpointCalls
from recompute_scan.record.isolation import Guard, Patches
from recompute_scan.record.region_ranges import CheckpointCall


class Noted:
    """Regions that note which runs of a call they are around."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.seen: list[str] = []

    def preparing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def region(self, call: CheckpointCall) -> Noted:
        self.seen.append(call.variant)
        return self

    def around_module(self, _: CheckpointCall) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def forward(self, given: Sequence[object] = ()) -> Iterator[None]:
        self.seen.append("forward")
        yield
        self.seen.append("forward ends")

    @contextmanager
    def recompute(self, given: Sequence[object] = ()) -> Iterator[None]:
        self.seen.append("recompute")
        yield
        self.seen.append("recompute ends")


def trained(regions: Noted, *, reentrant: bool) -> torch.Tensor:
    """The gradient of a checkpointed function, with the wrappers in place."""
    patches, guard = Patches(), Guard()
    calls = CheckpointCalls(regions, CallSites(Path.cwd()), patches, guard)
    assert calls.watch_reentrant()
    assert calls.watch_non_reentrant()
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    try:
        checkpoint(lambda x: (x * x).sin(), weight, use_reentrant=reentrant).sum().backward()
    finally:
        patches.undo()
    assert guard.failure is None
    assert calls.entered == {"reentrant" if reentrant else "non-reentrant": 1}
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_region_is_around_the_forward_and_each_recompute(reentrant: bool) -> None:
    regions = Noted(wanted=True)
    gradient = trained(regions, reentrant=reentrant)
    runs = [word for word in regions.seen if "ends" not in word]
    assert runs == ["reentrant" if reentrant else "non-reentrant", "forward", "recompute"]
    assert "forward ends" in regions.seen
    assert torch.equal(gradient, trained(Noted(wanted=False), reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_no_call_gets_a_region_where_none_is_wanted(reentrant: bool) -> None:
    regions = Noted(wanted=False)
    trained(regions, reentrant=reentrant)
    assert regions.seen == []
