"""Healthy trainings that do what looks like a change, and is none.

Each is named by what it does; a part of them changes for a reason what is recomputed.
"""

import copy
import gc
import io
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.guard import nets
from tests.guard.nets import Net, train_step
from tests.guard.ranks import both_ranks

Training = Callable[[int], None]


def _sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.001)


def _loss(net: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = net(torch.randn(4, 8)).square().mean()
    return loss


def _blocks(net: Net) -> list[Any]:
    return list(net.blocks)


def _left_out(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x


def _stepped(*optimizers: torch.optim.Optimizer) -> None:
    for one in optimizers:
        one.step()
        one.zero_grad()


def _trained(
    net: Net, steps: int, before: Callable[[int], object], rows: Callable[[int], int] = lambda _: 4
) -> None:
    """So many steps, each behind what ``before`` does, with as many rows as ``rows`` says."""
    optimizer = _sgd(net)
    for number in range(steps):
        before(number)
        train_step(net, optimizer, rows=rows(number))


def _accumulated(net: Net, steps: int, batches: Callable[[int], int]) -> None:
    """So many steps, each of as many micro-batches as ``batches`` says."""
    optimizer = _sgd(net)
    for number in range(steps):
        for _ in range(batches(number)):
            _loss(net).backward()
        _stepped(optimizer)


def evaluation(steps: int) -> None:
    """Evaluation in between, without and with gradients."""
    net = Net()

    def evaluate(number: int) -> None:
        if number and number % 50 == 0:
            net.eval()
            with torch.no_grad():
                for _ in range(3):
                    _loss(net)
            _loss(net)
            net.train()

    _trained(net, steps, evaluate)


def micro_batches(steps: int) -> None:
    """As many micro-batches as chance has it."""
    chance = random.Random(0)
    _accumulated(Net(), steps, lambda _: chance.randint(1, 3))


def short_groups(steps: int) -> None:
    """Gradients accumulate over four micro-batches; an epoch's last group has one."""
    _accumulated(Net(), steps, lambda number: 1 if number % 30 == 29 else 4)


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
    chance = random.Random(0)
    _trained(Net(), steps, lambda _: None, lambda _: chance.randint(1, 16))


def resumed(steps: int) -> None:
    """A new model and a new optimizer from state dicts, half-way."""
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


def old_model_kept(steps: int) -> None:
    """A new model from a state dict, while the old one stays alive."""
    old = Net()
    _trained(old, steps // 2, lambda _: None)
    net = Net()
    net.load_state_dict(old.state_dict())
    _trained(net, steps // 2, lambda _: None)
    assert gc.is_tracked(old)


def skipped(steps: int) -> None:
    """Steps left out, as a scaler does where gradients are infinite."""
    net = Net()
    optimizer = _sgd(net)
    for number in range(1, steps * 7 // 6 + 1):
        _loss(net).backward()
        if number % 7:
            optimizer.step()
        optimizer.zero_grad()


def layer_drop(steps: int) -> None:
    """Layers left out by chance, one in three steps each."""
    net, chance = Net(), random.Random(0)

    def drop(_: int) -> None:
        net.how[:] = [_left_out if chance.random() < 1 / 3 else nets.once for _ in net.how]

    _trained(net, steps, drop)


def experts(steps: int) -> None:
    """Experts of which some come late, and seldom."""
    net, chance = Net(), random.Random(0)

    def choose(number: int) -> None:
        often = [True, chance.random() < 0.5, number > 100 and chance.random() < 0.1]
        last = number > steps // 2 and chance.random() < 0.3
        net.how[:] = [nets.once if one else _left_out for one in (*often, last)]

    _trained(net, steps, choose)


def growing(steps: int) -> None:
    """Progressive depth: two layers, then three, then four."""
    net = Net()
    net.how[2:] = [_left_out] * 2

    def grow(number: int) -> None:
        if number in (steps // 3, 2 * steps // 3):
            net.how[2 + (number > steps // 2)] = nets.once

    _trained(net, steps, grow)


def frozen(steps: int) -> None:
    """The first layers frozen from the beginning, one more half-way."""
    net = Net()
    for part in (net.first, net.blocks[0]):
        part.requires_grad_(False)

    def freeze(number: int) -> None:
        if number == steps // 2:
            net.blocks[1].requires_grad_(False)

    _trained(net, steps, freeze)


def freezing(steps: int) -> None:
    """Layers are frozen one after the other, from the first on."""
    net = Net()

    def freeze(number: int) -> None:
        if number and number % (steps // 5) == 0:
            for part in (net.first, *_blocks(net)[: number // (steps // 5) - 1]):
                part.requires_grad_(False)

    _trained(net, steps, freeze)


def unfrozen(steps: int) -> None:
    """The last layer first, then one more."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for part in (net.first, *_blocks(net)[:3]):
        part.requires_grad_(False)
    for number in range(steps):
        if number == steps // 2:
            net.blocks[2].requires_grad_(True)
        train_step(net, optimizer)


def merged_adapters(steps: int) -> None:
    """Low-rank adapters are trained, merged into the weights half-way, and all is trained then."""
    net = Net()
    net.requires_grad_(False)
    adapters = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in net.blocks)
    for block, adapter in zip(_blocks(net), adapters, strict=True):
        block.adapter = adapter
        block.extra = lambda x, adapter=adapter: x + adapter(x)
    _trained(net, steps // 2, lambda _: None)
    for block in _blocks(net):
        block.inner.weight.data += block.adapter.weight.data
        del block.adapter
        block.extra = lambda x: x
    net.requires_grad_(True)
    _trained(net, steps - steps // 2, lambda _: None)


def compiled_warm_up(steps: int) -> None:
    """A part is compiled from some step on, and again for another size."""
    net, chance = Net(), random.Random(0)

    def compile_first(number: int) -> None:
        if number == 10:
            setattr(net, "first", torch.compile(net.first, backend="eager"))  # noqa: B010

    _trained(net, steps, compile_first, lambda n: chance.choice([4, 8]) if n > 30 else 4)


def two_models(steps: int) -> None:
    """A generator and a critic that is stepped three times as often."""
    generator, critic = Net(2), Net(3, reentrant=True)
    first, second = _sgd(generator), _sgd(critic)
    for _ in range(steps):
        for _ in range(3):
            critic(generator(torch.randn(4, 8)).detach()).square().mean().backward()
            _stepped(second)
        critic(generator(torch.randn(4, 8))).mean().backward()
        _stepped(first)


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


def listed(steps: int) -> None:
    """Models of the same names in a list, each with its optimizer."""
    models = [Net(2), Net(2, reentrant=True), Net(3)]
    optimizers = [_sgd(one) for one in models]
    for _ in range(steps):
        for each in zip(models, optimizers, strict=True):
            train_step(*each)


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
        _stepped(optimizer)


def threads(steps: int) -> None:
    """Another thread evaluates while this one trains, with random numbers of its own: drawn from
    torch's, they would be among those of the recomputes.
    """
    other = Net().eval()
    over = threading.Event()
    numbers = torch.Generator()

    def evaluate() -> None:
        while not over.wait(0.01):
            with torch.no_grad():
                other(torch.randn(4, 8, generator=numbers))

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        _trained(Net(), steps, lambda _: None)
    finally:
        over.set()
        thread.join()


def two_ranks(steps: int) -> None:
    """DistributedDataParallel on two processes; this one is rank 0."""
    both_ranks(steps)


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
                _stepped(optimizer)
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
        _stepped(optimizer)
        done += 1


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


def _penalised(steps: int, every: int, begin: int) -> None:
    net = Net()
    optimizer = _sgd(net)
    for number in range(begin, begin + steps):
        x = torch.randn(4, 8, requires_grad=True)
        loss = net(x).square().mean()
        if number % every == 0:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        _stepped(optimizer)


def penalty(steps: int) -> None:
    """A penalty on gradients, which runs backward twice, in each 16th step."""
    _penalised(steps, 16, 0)


def late_penalty(steps: int) -> None:
    """The same in each 64th step: later than what is usual was learned."""
    _penalised(steps, 64, 1)


HEALTHY: tuple[Training, ...] = (
    evaluation, micro_batches, schedule, lengths, resumed, skipped, layer_drop, two_models, frozen,
    unfrozen, threads, two_ranks, short_groups, growing, merged_adapters, phases, no_sync, failures,
    compiled_warm_up, several_tries, penalty, late_penalty, experts, teacher, old_model_kept,
    listed, freezing,
)  # fmt: skip
