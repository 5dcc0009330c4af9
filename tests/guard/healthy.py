"""Twelve healthy trainings that do what looks like a change, and is none."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable

import torch
from torch import nn

from tests.guard import nets
from tests.guard.nets import Net, train_step
from tests.guard.ranks import both_ranks

Training = Callable[[int], None]


def _sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.001)


def _loss(net: nn.Module, rows: int = 4) -> torch.Tensor:
    loss: torch.Tensor = net(torch.randn(rows, 8)).square().mean()
    return loss


def evaluation(steps: int) -> None:
    """Evaluation in between, without and with gradients."""
    net = Net()
    optimizer = _sgd(net)
    for number in range(steps):
        train_step(net, optimizer)
        if number % 50 == 49:
            net.eval()
            with torch.no_grad():
                for _ in range(3):
                    _loss(net)
            _loss(net)
            net.train()


def micro_batches(steps: int) -> None:
    """As many micro-batches as chance has it."""
    net, chance = Net(), random.Random(0)
    optimizer = _sgd(net)
    for _ in range(steps):
        for _ in range(chance.randint(1, 3)):
            _loss(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def schedule(steps: int) -> None:
    """A learning rate that moves, to 0 at the end."""
    net = Net()
    optimizer = _sgd(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: max(0.0, 1 - k / steps))
    for _ in range(steps):
        train_step(net, optimizer)
        scheduler.step()


def lengths(steps: int) -> None:
    """Batches of many sizes."""
    net, chance = Net(), random.Random(0)
    optimizer = _sgd(net)
    for _ in range(steps):
        train_step(net, optimizer, rows=chance.randint(1, 16))


def resumed(steps: int) -> None:
    """A new model from a state dict, half-way."""
    net = Net()
    optimizer = _sgd(net)
    for _ in range(steps // 2):
        train_step(net, optimizer)
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model, state = torch.load(file)
    net = Net()
    net.load_state_dict(model)
    optimizer = _sgd(net)
    optimizer.load_state_dict(state)
    for _ in range(steps // 2):
        train_step(net, optimizer)


def skipped(steps: int) -> None:
    """Steps left out, as a scaler does where gradients are infinite."""
    net = Net()
    optimizer = _sgd(net)
    done = 0
    number = 0
    while done < steps:
        number += 1
        _loss(net).backward()
        if number % 7:
            optimizer.step()
            done += 1
        optimizer.zero_grad()


def layer_drop(steps: int) -> None:
    """Layers left out by chance, one in three steps each."""
    net, chance = Net(), random.Random(0)
    optimizer = _sgd(net)
    for _ in range(steps):
        net.how[:] = [
            (lambda block, x: x) if chance.random() < 1 / 3 else nets.once for _ in net.how
        ]
        train_step(net, optimizer)


def two_models(steps: int) -> None:
    """A generator and a critic that is stepped three times as often."""
    generator, critic = Net(2), Net(3, reentrant=True)
    first, second = _sgd(generator), _sgd(critic)
    for _ in range(steps):
        for _ in range(3):
            made = generator(torch.randn(4, 8)).detach()
            critic(made).square().mean().backward()
            second.step()
            second.zero_grad()
        critic(generator(torch.randn(4, 8))).mean().backward()
        first.step()
        first.zero_grad()


def frozen(steps: int) -> None:
    """The first layers frozen from the beginning, one more half-way."""
    net = Net()
    for part in (net.first, net.blocks[0]):
        part.requires_grad_(False)
    optimizer = _sgd(net)
    for number in range(steps):
        if number == steps // 2:
            net.blocks[1].requires_grad_(False)
        train_step(net, optimizer)


def unfrozen(steps: int) -> None:
    """The last layer first, then one more."""
    net = Net()
    for part in (net.first, *net.blocks[:3]):
        part.requires_grad_(False)
    optimizer = _sgd(net)
    for number in range(steps):
        if number == steps // 2:
            net.blocks[2].requires_grad_(True)
        train_step(net, optimizer)


def threads(steps: int) -> None:
    """Another thread evaluates while this one trains, with random numbers of its own: drawn from
    torch's, they would be among those of the recomputes.
    """
    net, other = Net(), Net().eval()
    optimizer = _sgd(net)
    over = threading.Event()
    numbers = torch.Generator()

    def evaluate() -> None:
        while not over.wait(0.01):
            with torch.no_grad():
                other(torch.randn(4, 8, generator=numbers))

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(steps):
            train_step(net, optimizer)
    finally:
        over.set()
        thread.join()


def two_ranks(steps: int) -> None:
    """DistributedDataParallel on two processes; this one is rank 0."""
    both_ranks(steps)


HEALTHY: tuple[Training, ...] = (
    evaluation, micro_batches, schedule, lengths, resumed, skipped, layer_drop, two_models, frozen,
    unfrozen, threads, two_ranks,
)  # fmt: skip
