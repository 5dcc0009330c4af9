"""Small trainings that callbacks and the guard look at, and hooks' own count of what ran."""

from collections.abc import Callable
from typing import Any

import torch

import recompute_scan
from recompute_scan.integrations.follower import Follower
from tests.callbacks.counted import Counter
from tests.guard import nets

STEPS = 6
INJECTED, GUARDED = 20, 26


def followed(log: Callable[[int, float], object], **options: Any) -> tuple[Follower, float]:
    """A doubled training that logs each step; with it the recomputes that hooks have counted."""
    torch.manual_seed(0)
    net = nets.Net(2)
    net.how[:] = [nets.twice_reentrant] * 2
    counter = Counter(net.blocks[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    given: dict[str, Any] = {"folder": None, "device": "cpu", "trackers": True, **options}
    follower = Follower(steps=1, warmup=2, timing_steps=0, **given)
    follower._begin()
    for step in range(STEPS):
        loss = nets.train_step(net, optimizer)
        log(step, float.fromhex(loss))
        follower._step()
    follower._end()
    return follower, counter.recomputes


def guarded(log: Callable[[int, float], object], **options: Any) -> list[Any]:
    """A training whose second block is doubled from one step on; what the guard has told."""
    torch.manual_seed(0)
    net = nets.Net(reentrant=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with recompute_scan.guard(sample_every=0, **options) as guard:
        for step in range(1, GUARDED + 1):
            if step == INJECTED:
                net.how[1] = nets.twice_reentrant
            log(step, float.fromhex(nets.train_step(net, optimizer)))
    assert guard.failure is None
    return guard.changes
