"""What ``prediction.py`` trains: a transformer of any size, or another kind of model, checkpointed
before and after a change.

Each case is a pair of arrangements of checkpoints around the same layers. The model is built
twice from the same seed, so both do the same work but for the recomputes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from benchmarks.prediction_kinds import KINDS

Variant = Literal["R", "N"] | None
VOCABULARY = 512
Step = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """A model's size, and what goes through it in one step."""

    layers: int
    width: int
    length: int
    batch: int
    heads: int = 4


@dataclass(frozen=True)
class Asked:
    """Checkpoints: around all layers together, around each layer from outside, and inside it.

    ``R`` is reentrant, ``N`` is not.
    """

    stack: Variant = None
    outer: Variant = None
    inner: Variant = None


Sharding = Literal["none", "fsdp1", "fsdp1-outside", "fsdp2", "ddp"]


@dataclass(frozen=True)
class Case:
    """A change to predict.

    Attributes:
        name: For the table.
        size: Of the model.
        before: Checkpoints that are there.
        after: Checkpoints that are left.
        sharding: ``fsdp1-outside`` has the wrapper around the FSDP unit, so that each of its
            recomputes gathers the parameters again.
        ranks: Processes.
        kind: Another kind of model than a transformer, from ``prediction_kinds.py``.
        threads: torch's.
    """

    name: str
    size: Size
    before: Asked
    after: Asked
    sharding: Sharding = "none"
    ranks: int = 1
    kind: str = ""
    threads: int = 1

    @property
    def removes_all(self) -> bool:
        """Whether no checkpoint is left."""
        return self.after == Asked()


TINY = Size(layers=4, width=32, length=16, batch=2)
DEEP = Size(layers=12, width=64, length=16, batch=2)
SMALL = Size(layers=4, width=128, length=64, batch=4)
LARGER = Size(layers=4, width=256, length=128, batch=4)
WIDE = Size(layers=3, width=512, length=128, batch=2, heads=8)

_NONE = Asked()
CASES = (
    Case("tiny, R in N, R removed", TINY, Asked(outer="N", inner="R"), Asked(outer="N")),
    Case("tiny, R in N, N removed", TINY, Asked(outer="N", inner="R"), Asked(inner="R")),
    Case("tiny, N in R, R removed", TINY, Asked(outer="R", inner="N"), Asked(inner="N")),
    Case("tiny, R in R, one removed", TINY, Asked(outer="R", inner="R"), Asked(inner="R")),
    Case("deep, R in N, R removed", DEEP, Asked(outer="N", inner="R"), Asked(outer="N")),
    Case("deep, N around all and each", DEEP, Asked(stack="N", outer="N"), Asked(outer="N")),
    Case("small, R in N, R removed", SMALL, Asked(outer="N", inner="R"), Asked(outer="N")),
    Case("small, N in R, R removed", SMALL, Asked(outer="R", inner="N"), Asked(inner="N")),
    Case("larger, R in N, R removed", LARGER, Asked(outer="N", inner="R"), Asked(outer="N")),
    Case("larger, R in R, one removed", LARGER, Asked(outer="R", inner="R"), Asked(inner="R")),
    Case("wide, R in N, R removed", WIDE, Asked(outer="N", inner="R"), Asked(outer="N")),
    Case("wide, N around all and each", WIDE, Asked(stack="N", outer="N"), Asked(outer="N")),
    Case("tiny, N to none", TINY, Asked(outer="N"), _NONE),
    Case("tiny, R to none", TINY, Asked(outer="R"), _NONE),
    Case("small, N to none", SMALL, Asked(outer="N"), _NONE),
    Case("larger, R to none", LARGER, Asked(outer="R"), _NONE),
    Case("wide, N to none", WIDE, Asked(outer="N"), _NONE),
    Case(
        "fsdp1 small, R in N, R removed",
        SMALL,
        Asked(outer="N", inner="R"),
        Asked(outer="N"),
        "fsdp1",
        2,
    ),
    Case(
        "fsdp1 larger, R in N, R removed",
        LARGER,
        Asked(outer="N", inner="R"),
        Asked(outer="N"),
        "fsdp1",
        2,
    ),
    Case(
        "fsdp1 larger, R in N outside, N removed",
        LARGER,
        Asked(outer="N", inner="R"),
        Asked(inner="R"),
        "fsdp1-outside",
        2,
    ),
    Case(
        "fsdp2 larger, R in N, R removed",
        LARGER,
        Asked(outer="N", inner="R"),
        Asked(outer="N"),
        "fsdp2",
        2,
    ),
    Case("fsdp2 small, N to none", SMALL, Asked(outer="N"), _NONE, "fsdp2", 2),
    Case(
        "ddp small, R in N, R removed",
        SMALL,
        Asked(outer="N", inner="R"),
        Asked(outer="N"),
        "ddp",
        2,
    ),
)


def _kinds() -> Iterator[Case]:
    """Both changes for each other kind of model, and some with two threads."""
    twice, once = Asked(outer="N", inner="R"), Asked(outer="N")
    for kind in KINDS:
        yield Case(f"{kind}, R in N, R removed", SMALL, twice, once, kind=kind)
        yield Case(f"{kind}, N to none", SMALL, once, _NONE, kind=kind)
    for kind in ("convolutions, large", "mlp, large", "experts"):
        name = f"{kind}, two threads, N to none"
        yield Case(name, SMALL, once, _NONE, kind=kind, threads=2)


# Held apart: no constant of the prediction was chosen after them.
HELD_APART = tuple(_kinds())


def build(case: Case, asked: Asked, device: torch.device) -> Step:
    """One training step of the case's model with these checkpoints."""
    torch.manual_seed(0)
    if case.kind:
        other, given = KINDS[case.kind].build(asked.outer, asked.inner, device)
        labels = given if given.dtype == torch.int64 else torch.arange(len(given)) % 10
        return _step(other, given, labels.to(device))
    model: nn.Module = Transformer(case.size, asked).to(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        model = _distribute(model, case.sharding, asked.outer)
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    shape = (case.size.batch, case.size.length + 1)
    tokens = torch.randint(0, VOCABULARY, shape, device=device)
    return _step(model, tokens[:, :-1], tokens[:, 1:])


def _step(model: nn.Module, given: Tensor, labels: Tensor) -> Step:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> None:
        logits = model(given)
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _distribute(model: nn.Module, sharding: Sharding, outer: Variant) -> nn.Module:
    if sharding == "fsdp1":
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=_device(model)
        )
        _wrap(model, outer, Layer)
        return model
    if sharding == "fsdp1-outside":
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=_device(model)
        )
        _wrap(model, outer, FullyShardedDataParallel)
        return model
    _wrap(model, outer, Layer)
    if sharding == "fsdp2":
        mesh = init_device_mesh(_device(model).type, (dist.get_world_size(),))
        for module in (*model.get_submodule("layers").children(), model):
            fully_shard(module, mesh=mesh)
    if sharding == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return model


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _wrap(model: nn.Module, variant: Variant, kind: type[nn.Module]) -> None:
    if variant is None:
        return
    implementation = CheckpointImpl.REENTRANT if variant == "R" else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
        check_fn=lambda module: isinstance(module, kind) and module is not model,
    )


def _run(variant: Variant, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if variant is None:
        return function(x)
    result: Tensor = checkpoint(function, x, use_reentrant=variant == "R")
    return result


class Layer(nn.Module):
    """Causal self-attention and an MLP, before each a layer norm."""

    def __init__(self, size: Size, inner: Variant) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.inner = inner
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return _run(self.inner, self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return result


class Transformer(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, size: Size, asked: Asked) -> None:
        super().__init__()
        self.stack = asked.stack
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Layer(size, asked.inner) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = _run(self.stack, self._layers, self.embedding(tokens))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
