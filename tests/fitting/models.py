"""Small models with layers of many kinds, and their trainings, with fit and without."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recompute_scan

WIDTH, WORDS = 32, 64
LIMIT = "60%"


class Block(nn.Module):
    """A layer; ``kind`` says what else it does."""

    average: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1 if "dropout" in kind else 0.0)
        self.calls = 0
        self.aux: Any = None
        if "batch" in kind:
            self.batch = nn.BatchNorm1d(WIDTH)
        if "average" in kind:
            self.register_buffer("average", torch.zeros(WIDTH))
        if "recurrent" in kind:
            self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if "spectral" in kind:
            nn.utils.parametrizations.spectral_norm(self.down)

    def forward(self, x: Tensor, losses: Any = None, *, scale: float = 1.0) -> Any:
        if "in place" in self.kind:
            x.mul_(1.01)
        h = self.norm(x)
        if "recurrent" in self.kind:
            h = self.cells(h)[0]
        if "batch" in self.kind:
            h = self.batch(h.transpose(1, 2)).transpose(1, 2)
        if "counts" in self.kind:
            self.calls += 1
            h = h * (1 + 0.1 * self.calls)
        if "average" in self.kind:
            h = h + self.average
            with torch.no_grad():
                self.average.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        if "random" in self.kind:
            h = h * (1 + random.random())
        y = self.drop(self.down(F.gelu(self.up(h)))) * scale
        if "aux" in self.kind:
            self.aux = y.square().mean()
        if losses is not None:
            losses.append(y.abs().mean())
        return (x + y, {"mean": y.mean()}) if "tuple" in self.kind else x + y


class Net(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, kind: str = "", layers: int = 6) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(kind) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if "tied" in kind:
            self.head.weight = self.words.weight
        if "shared" in kind:
            self.layers[3] = self.layers[1]

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        x, extra = self.words(tokens), 0.0
        losses: list[Tensor] | None = [] if "list" in self.kind else None
        for layer in self.layers:
            if "checkpoint" in self.kind:
                x = checkpoint(layer, x, use_reentrant="reentrant" in self.kind)
            elif "tuple" in self.kind:
                x, more = layer(x, scale=0.5)
                extra = extra + more["mean"]
            elif "keyword" in self.kind:
                x = layer(x=x, scale=0.7)
            else:
                x = layer(x, losses)
        if "aux" in self.kind:
            extra = sum(layer.aux for layer in self.layers)  # type: ignore[misc]
        return self.head(x), sum(losses) if losses else extra


def train(
    kind: str = "",
    *,
    fit: str | int | None = None,
    steps: int = 20,
    length: Callable[[int], int] = lambda _: 16,
    prepare: Callable[[Any], object] = lambda _: None,
    **settings: Any,
) -> tuple[Any, list[str]]:
    """The trained model, and the bits of its losses."""
    torch.manual_seed(0)
    random.seed(0)
    model = Net(kind)
    if fit is not None:
        recompute_scan.fit(model, fit, quiet=True, **settings)
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    draw = torch.Generator().manual_seed(1)
    losses: list[Any] = []
    for step in range(steps):
        for _ in range(3 if "accumulated" in kind else 1):
            tokens = torch.randint(0, WORDS, (4, length(step)), generator=draw)
            half = torch.autocast("cpu", torch.bfloat16) if "autocast" in kind else nullcontext()
            with half:
                loss = loss_of(model, tokens)
                if "twice" in kind:
                    loss = loss + loss_of(model, tokens.flip(1))
            if "penalty" in kind:
                weights = [model.head.weight]
                (found,) = torch.autograd.grad(loss, weights, create_graph=True)
                loss = loss + found.square().sum()
            loss.backward()
            losses.append(loss.item())
        if "clipped" in kind:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if "evaluated" in kind:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, tokens).item())
            model.train()
        if "averaged" in kind and step % 5 == 4:
            other = copy.deepcopy(model)
            loss_of(other, tokens).backward()
            losses.append(
                sum(p.grad.sum().item() for p in other.parameters() if p.grad is not None)
            )
    return model, [value.hex() for value in losses]


def loss_of(model: Any, tokens: Tensor) -> Any:
    out, extra = model(tokens)
    return F.cross_entropy(out.flatten(0, 1).float(), tokens.flatten()) + 0.01 * extra


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same state to the bit."""
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)
