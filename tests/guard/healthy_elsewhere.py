"""Healthy trainings of kinds that others have, in which what is recomputed changes for a reason."""

from __future__ import annotations

import copy
import gc
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.guard import nets
from tests.guard.healthy import Training
from tests.guard.nets import Net, train_step


def _sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.001)


def _blocks(net: Net) -> list[Any]:
    return list(net.blocks)


def _loss(net: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = net(torch.randn(4, 8)).square().mean()
    return loss


def short_groups(steps: int) -> None:
    """Gradients accumulate over four micro-batches; an epoch's last group has one."""
    net = Net()
    optimizer = _sgd(net)
    for number in range(steps):
        for _ in range(1 if number % 30 == 29 else 4):
            _loss(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def growing(steps: int) -> None:
    """Progressive depth: two layers, then three, then four."""
    net = Net()
    net.how[2:] = [lambda block, x: x] * 2
    optimizer = _sgd(net)
    for number in range(steps):
        if number in (steps // 3, 2 * steps // 3):
            net.how[2 + (number > steps // 2)] = nets.once
        train_step(net, optimizer)


def merged_adapters(steps: int) -> None:
    """Low-rank adapters are trained, merged into the weights half-way, and all is trained then."""
    net = Net()
    net.requires_grad_(False)
    adapters = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in net.blocks)
    for block, adapter in zip(_blocks(net), adapters, strict=True):
        block.adapter = adapter
        block.extra = lambda x, adapter=adapter: x + adapter(x)
    optimizer = _sgd(net)
    for number in range(steps):
        if number == steps // 2:
            for block in _blocks(net):
                block.inner.weight.data += block.adapter.weight.data
                del block.adapter
                block.extra = lambda x: x
            net.requires_grad_(True)
            optimizer = _sgd(net)
        train_step(net, optimizer)


def phases(steps: int) -> None:
    """A critic alone for some steps, then the actor alone, and so on."""
    actor, critic = Net(2), Net(3)
    optimizers = _sgd(actor), _sgd(critic)
    for number in range(steps):
        if number // 60 % 2:
            critic(actor(torch.randn(4, 8))).mean().backward()
            optimizers[0].step()
        else:
            with torch.no_grad():
                made = actor(torch.randn(4, 8))
            critic(made).square().mean().backward()
            optimizers[1].step()
        for one in optimizers:
            one.zero_grad()


def no_sync(steps: int) -> None:
    """DistributedDataParallel whose first micro-batches are not synchronised."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "store"
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
        try:
            model = DistributedDataParallel(Net())
            optimizer = _sgd(model)
            for number in range(steps):
                if number % 9:
                    with model.no_sync():
                        _loss(model).backward()
                _loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            dist.destroy_process_group()


def failures(steps: int) -> None:
    """Batches that fail in the forward, or the backward pass, and are left out."""
    net, done = Net(), 0
    optimizer = _sgd(net)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    number = 0
    while done < steps:
        number += 1
        if number % 23 == 0:
            _blocks(net)[2].extra = fails
        try:
            loss = _loss(net)
            if number % 17 == 0:
                _blocks(net)[1].extra = fails  # the recompute fails
            loss.backward()
        except RuntimeError:
            optimizer.zero_grad()
            continue
        finally:
            for block in _blocks(net):
                block.extra = lambda x: x
        optimizer.step()
        optimizer.zero_grad()
        done += 1


def compiled_warm_up(steps: int) -> None:
    """A part is compiled from some step on, and again for another size."""
    net, chance = Net(), random.Random(0)
    optimizer = _sgd(net)
    for number in range(steps):
        if number == 10:
            setattr(net, "first", torch.compile(net.first, backend="eager"))  # noqa: B010
        train_step(net, optimizer, rows=chance.choice([4, 8]) if number > 30 else 4)


def several_tries(steps: int) -> None:
    """An optimizer that asks for the loss several times in a step."""
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=3)
    x = torch.randn(4, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def penalty(steps: int) -> None:
    """A penalty on gradients, which runs backward twice, in each 16th step."""
    net = Net()
    optimizer = _sgd(net)
    for number in range(steps):
        x = torch.randn(4, 8, requires_grad=True)
        loss = net(x).square().mean()
        if number % 16 == 0:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def late_penalty(steps: int) -> None:
    """The same in each 64th step: later than what is usual was learned."""
    net = Net()
    optimizer = _sgd(net)
    for number in range(1, steps + 1):
        x = torch.randn(4, 8, requires_grad=True)
        loss = net(x).square().mean()
        if number % 64 == 0:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def experts(steps: int) -> None:
    """Experts of which some come late, and seldom."""
    net, chance = Net(), random.Random(0)
    optimizer = _sgd(net)
    for number in range(steps):
        often = [True, chance.random() < 0.5, number > 100 and chance.random() < 0.1]
        last = number > steps // 2 and chance.random() < 0.3
        net.how[:] = [nets.once if one else (lambda block, x: x) for one in (*often, last)]
        train_step(net, optimizer)


def teacher(steps: int) -> None:
    """A copy of the model, as a teacher from step 100 on; the copy is kept and made anew."""
    net = Net()
    optimizer = _sgd(net)
    copied = None
    for number in range(steps):
        if number and number % 100 == 0:
            copied = copy.deepcopy(net).eval().requires_grad_(False)
        x = torch.randn(4, 8)
        loss = net(x).square().mean()
        if copied is not None:
            loss = loss + (copied(x) - net(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def old_model_kept(steps: int) -> None:
    """A new model from a state dict, while the old one stays alive."""
    net = Net()
    optimizer = _sgd(net)
    for _ in range(steps // 2):
        train_step(net, optimizer)
    old, net = net, Net()
    net.load_state_dict(old.state_dict())
    optimizer = _sgd(net)
    for _ in range(steps // 2):
        train_step(net, optimizer)
    assert gc.is_tracked(old)


def listed(steps: int) -> None:
    """Models of the same names in a list, each with its optimizer."""
    models = [Net(2), Net(2, reentrant=True), Net(3)]
    optimizers = [_sgd(one) for one in models]
    for _ in range(steps):
        for each in zip(models, optimizers, strict=True):
            train_step(*each)


def freezing(steps: int) -> None:
    """Layers are frozen one after the other, from the first on."""
    net = Net()
    optimizer = _sgd(net)
    for number in range(steps):
        if number and number % (steps // 5) == 0:
            place = number // (steps // 5) - 1
            net.first.requires_grad_(False)
            for block in list(net.blocks)[:place]:
                block.requires_grad_(False)
        train_step(net, optimizer)


HEALTHY_ELSEWHERE: tuple[Training, ...] = (
    short_groups, growing, merged_adapters, phases, no_sync, failures, compiled_warm_up,
    several_tries, penalty, late_penalty, experts, teacher, old_model_kept, listed, freezing,
)  # fmt: skip
