"""A training in which each part of a block runs three times, inside one checkpoint or two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Half(nn.Module):
    """One half of a block: a norm and a product, twice as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


class Block(nn.Module):
    """Two halves, checkpointed each, and together once more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Half(width), Half(width)

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = torch.utils.checkpoint.checkpoint(self.both, x, use_reentrant=True)
        return whole

    def both(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        again: Tensor = torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=False)
        return again


class Training:
    """A model, its data, and its optimizer."""

    def __init__(self, width: int, blocks: int, rows: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.data = torch.randn(rows, width, requires_grad=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self) -> Tensor:
        """What is made smaller."""
        loss: Tensor = self.model(self.data).square().mean()
        return loss

    def regions(self) -> Iterable[nn.Module]:
        """The modules behind checkpoints."""
        return (one for one in self.model.modules() if isinstance(one, (Block, Half)))

    def step(self, ended: Callable[[], None]) -> float:
        """One ordinary step, in ms of the processor; ``ended`` is what the loop calls behind it."""
        began = time.thread_time()
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended()
        return 1e3 * (time.thread_time() - began)


def nothing() -> None:
    """What a loop without us calls."""
