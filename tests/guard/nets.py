"""A small checkpointed model whose checkpoints can be changed while it trains."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


class Block(nn.Module):
    """Two layers, dropout, and whatever a test makes of them."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.extra: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.drop(self.norm(self.inner(x)).relu()))


class Net(nn.Module):
    """Blocks, each called as ``how[number]`` says."""

    def __init__(self, blocks: int = 4, *, reentrant: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(norm=norm) for _ in range(blocks))
        how = once_reentrant if reentrant else once
        self.how: list[Callable[[nn.Module, torch.Tensor], Any]] = [how] * blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block, how in zip(self.blocks, self.how, strict=True):
            x = how(block, x)
        return x


def plainly(block: nn.Module, x: torch.Tensor) -> Any:
    return block(x)


def once(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def once_reentrant(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True)


def twice(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(lambda x: once(block, x), x, use_reentrant=False)


def twice_to_the_end(block: nn.Module, x: torch.Tensor) -> Any:
    """Twice, where the outer recompute does not stop where it has what it saves: its inputs."""
    with set_checkpoint_early_stop(enable=False):
        return twice(block, x)


def twice_reentrant(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(lambda x: once_reentrant(block, x), x, use_reentrant=True)


def reentrant_around(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(lambda x: once(block, x), x, use_reentrant=True)


def reentrant_inside(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(lambda x: once_reentrant(block, x), x, use_reentrant=False)


def other_random(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def detached(block: nn.Module, x: torch.Tensor) -> Any:
    return x + checkpoint(block, x.detach(), use_reentrant=True)


def train_step(net: Net, optimizer: torch.optim.Optimizer, rows: int = 4) -> str:
    """One step; its loss, to the last bit."""
    loss = net(torch.randn(rows, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()).hex()
