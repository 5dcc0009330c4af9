"""Kinds of models for ``prediction.py`` beside its transformers, small and large.

None of them was there when the constants of the prediction were chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.plan_cases import Convolution, Experts, Lora, Mlp, Post, Recurrent

Variant = Literal["R", "N"] | None
_ROWS = 20_000


class Lookup(nn.Module):
    """A table of its own for every layer, looked up by what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.mlp = nn.Embedding(_ROWS, width), Mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.detach().abs().sum(-1) * 1000).long() % _ROWS
        y: Tensor = self.mlp(x + self.table(rows))
        return y


class Normed(nn.Module):
    """A convolution with batch normalization."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Layers(nn.Module):
    """Layers with checkpoints from outside and inside, between a stem and a head."""

    def __init__(
        self, stem: nn.Module, layers: list[nn.Module], width: int, outer: Variant, inner: Variant
    ) -> None:
        super().__init__()
        self.stem, self.layers = stem, nn.ModuleList(layers)
        self.head = nn.Linear(width, 64)
        self.outer, self.inner = outer, inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = _run(self.outer, partial(_run, self.inner, layer), x)
        flat = x.mean((2, 3)) if x.dim() == 4 and isinstance(self.stem, nn.Conv2d) else x
        logits: Tensor = self.head(flat)
        return logits


def _run(variant: Variant, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if variant is None:
        return function(x)
    result: Tensor = checkpoint(function, x, use_reentrant=variant == "R")
    return result


@dataclass(frozen=True)
class Kind:
    """A kind of model: its layers, their width, what goes in (tokens, or pictures of 3 colours)."""

    layers: Callable[[], list[nn.Module]]
    width: int
    shape: tuple[int, ...]

    def build(
        self, outer: Variant, inner: Variant, device: torch.device
    ) -> tuple[nn.Module, Tensor]:
        """The model and its inputs."""
        pictures = len(self.shape) == 4
        stem = nn.Conv2d(3, self.width, 3, padding=1) if pictures else nn.Embedding(64, self.width)
        model = Layers(stem, self.layers(), self.width, outer, inner).to(device)
        if pictures:
            return model, torch.rand(self.shape, device=device)
        return model, torch.randint(0, 64, self.shape, device=device)


def _several(number: int, make: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    return lambda: [make() for _ in range(number)]


KINDS = {
    "convolutions": Kind(_several(5, lambda: Convolution(32)), 32, (4, 3, 32, 32)),
    "convolutions, large": Kind(_several(4, lambda: Convolution(64)), 64, (4, 3, 64, 64)),
    "recurrent": Kind(_several(3, lambda: Recurrent(96)), 96, (4, 32)),
    "embeddings": Kind(_several(3, lambda: Lookup(64)), 64, (4, 64)),
    "experts": Kind(_several(4, lambda: Experts(96, 384)), 96, (4, 64)),
    "batch norms": Kind(_several(5, lambda: Normed(32)), 32, (4, 3, 32, 32)),
    "lora": Kind(_several(4, lambda: Lora(128, 512)), 128, (4, 64)),
    "post-norm": Kind(_several(6, lambda: Post(128, 512)), 128, (4, 64)),
    "mlp, large": Kind(_several(4, lambda: Mlp(512, 2048)), 512, (4, 128)),
}
