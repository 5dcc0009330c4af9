"""What ``prediction.py`` trains, checkpointed before and after a change: a transformer of any size,
or another kind of model.

Each case is a pair of arrangements of checkpoints around the same layers. The model is built twice
from the same seed, so both do the same work but for the recomputes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from tests.plan.scripts import (
    Attention,
    Convolution,
    Experts,
    Lookup,
    Lora,
    Mlp,
    Normed,
    Post,
    Recurrent,
)
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

Variant = Literal["R", "N"] | None
Sharding = Literal["none", "fsdp1", "fsdp1-outside", "fsdp2", "ddp"]
VOCABULARY = 512
Step = Callable[[], None]


class Size(NamedTuple):
    """A model's size, and what goes through it in one step."""

    layers: int
    width: int
    length: int
    batch: int
    heads: int = 4


class Asked(NamedTuple):
    """Checkpoints: around all layers together, around each layer from outside, and inside it.

    ``R`` is reentrant, ``N`` is not.
    """

    stack: Variant = None
    outer: Variant = None
    inner: Variant = None


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
        kind: Another kind of model than a transformer, of ``KINDS``.
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


TINY = Size(layers=4, width=32, length=16, batch=2)
DEEP = Size(layers=12, width=64, length=16, batch=2)
SMALL = Size(layers=4, width=128, length=64, batch=4)
LARGER = Size(layers=4, width=256, length=128, batch=4)
WIDE = Size(layers=3, width=512, length=128, batch=2, heads=8)

NONE = Asked()
N, R = Asked(outer="N"), Asked(inner="R")
R_IN_N, N_IN_R = Asked(outer="N", inner="R"), Asked(outer="R", inner="N")
R_IN_R, ALL_AND_EACH = Asked(outer="R", inner="R"), Asked(stack="N", outer="N")

CASES = (
    Case("tiny, R in N, R removed", TINY, R_IN_N, N),
    Case("tiny, R in N, N removed", TINY, R_IN_N, R),
    Case("tiny, N in R, R removed", TINY, N_IN_R, Asked(inner="N")),
    Case("tiny, R in R, one removed", TINY, R_IN_R, R),
    Case("deep, R in N, R removed", DEEP, R_IN_N, N),
    Case("deep, N around all and each", DEEP, ALL_AND_EACH, N),
    Case("small, R in N, R removed", SMALL, R_IN_N, N),
    Case("small, N in R, R removed", SMALL, N_IN_R, Asked(inner="N")),
    Case("larger, R in N, R removed", LARGER, R_IN_N, N),
    Case("larger, R in R, one removed", LARGER, R_IN_R, R),
    Case("wide, R in N, R removed", WIDE, R_IN_N, N),
    Case("wide, N around all and each", WIDE, ALL_AND_EACH, N),
    Case("tiny, N to none", TINY, N, NONE),
    Case("tiny, R to none", TINY, Asked(outer="R"), NONE),
    Case("small, N to none", SMALL, N, NONE),
    Case("larger, R to none", LARGER, Asked(outer="R"), NONE),
    Case("wide, N to none", WIDE, N, NONE),
    Case("fsdp1 small, R in N, R removed", SMALL, R_IN_N, N, "fsdp1", 2),
    Case("fsdp1 larger, R in N, R removed", LARGER, R_IN_N, N, "fsdp1", 2),
    Case("fsdp1 larger, R in N outside, N removed", LARGER, R_IN_N, R, "fsdp1-outside", 2),
    Case("fsdp2 larger, R in N, R removed", LARGER, R_IN_N, N, "fsdp2", 2),
    Case("fsdp2 small, N to none", SMALL, N, NONE, "fsdp2", 2),
    Case("ddp small, R in N, R removed", SMALL, R_IN_N, N, "ddp", 2),
)


class Kind(NamedTuple):
    """A kind of model: a layer and how many, their width, what goes in (tokens, or pictures)."""

    layer: Callable[[], nn.Module]
    number: int
    width: int
    shape: tuple[int, ...]

    def build(self, asked: Asked, device: torch.device) -> tuple[nn.Module, Tensor]:
        """The model and its inputs."""
        pictures = len(self.shape) == 4
        stem = nn.Conv2d(3, self.width, 3, padding=1) if pictures else nn.Embedding(64, self.width)
        layers = [self.layer() for _ in range(self.number)]
        model = Layers(stem, layers, nn.Identity(), nn.Linear(self.width, 64), asked).to(device)
        model.outer = asked.outer
        if pictures:
            return model, torch.rand(self.shape, device=device)
        return model, torch.randint(0, 64, self.shape, device=device)


KINDS = {
    "convolutions": Kind(lambda: Convolution(32), 5, 32, (4, 3, 32, 32)),
    "convolutions, large": Kind(lambda: Convolution(64), 4, 64, (4, 3, 64, 64)),
    "recurrent": Kind(lambda: Recurrent(96), 3, 96, (4, 32)),
    "embeddings": Kind(lambda: Lookup(64), 3, 64, (4, 64)),
    "experts": Kind(lambda: Experts(96, 384), 4, 96, (4, 64)),
    "batch norms": Kind(lambda: Normed(32), 5, 32, (4, 3, 32, 32)),
    "lora": Kind(lambda: Lora(128, 512), 4, 128, (4, 64)),
    "post-norm": Kind(lambda: Post(128, 512), 6, 128, (4, 64)),
    "mlp, large": Kind(lambda: Mlp(512, 2048), 4, 512, (4, 128)),
}


def _kinds() -> Iterator[Case]:
    """Both changes for each other kind of model, and some with two threads."""
    for kind in KINDS:
        yield Case(f"{kind}, R in N, R removed", SMALL, R_IN_N, N, kind=kind)
        yield Case(f"{kind}, N to none", SMALL, N, NONE, kind=kind)
    for kind in ("convolutions, large", "mlp, large", "experts"):
        yield Case(f"{kind}, two threads, N to none", SMALL, N, NONE, kind=kind, threads=2)


# Held apart: no constant of the prediction was chosen after them.
HELD_APART = tuple(_kinds())


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size.width, size.heads)
        self.mlp = Mlp(size.width, 4 * size.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(self.attention(x))
        return result


class Inside(nn.Module):
    """A layer with its own checkpoint inside, if any."""

    def __init__(self, layer: nn.Module, variant: Variant) -> None:
        super().__init__()
        self.layer, self.variant = layer, variant

    def forward(self, x: Tensor) -> Tensor:
        return _run(self.variant, self.layer, x)


class Layers(nn.Module):
    """Layers with checkpoints from outside and inside, between a stem and a head."""

    def __init__(
        self,
        stem: nn.Module,
        layers: list[nn.Module],
        norm: nn.Module,
        head: nn.Module,
        asked: Asked,
    ) -> None:
        super().__init__()
        self.stem, self.norm, self.head = stem, norm, head
        self.layers = nn.ModuleList(Inside(layer, asked.inner) for layer in layers)
        self.stack = asked.stack
        #: Around each layer, where no wrapper puts it there.
        self.outer: Variant = None

    def forward(self, x: Tensor) -> Tensor:
        x = _run(self.stack, self._layers, self.stem(x))
        flat = x.mean((2, 3)) if x.dim() == 4 and isinstance(self.stem, nn.Conv2d) else x
        logits: Tensor = self.head(self.norm(flat))
        return logits

    def _layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _run(self.outer, layer, x)
        return x


def _run(variant: Variant, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if variant is None:
        return function(x)
    result: Tensor = checkpoint(function, x, use_reentrant=variant == "R")
    return result


def build(case: Case, asked: Asked, device: torch.device) -> Step:
    """One training step of the case's model with these checkpoints."""
    torch.manual_seed(0)
    if case.kind:
        other, given = KINDS[case.kind].build(asked, device)
        labels = given if given.dtype == torch.int64 else torch.arange(len(given)) % 10
        return _step(other, given, labels.to(device))
    size = case.size
    stem, norm = nn.Embedding(VOCABULARY, size.width), nn.LayerNorm(size.width)
    head = nn.Linear(size.width, VOCABULARY, bias=False)
    layers: list[nn.Module] = [Layer(size) for _ in range(size.layers)]
    model: nn.Module = Layers(stem, layers, norm, head, asked).to(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        model = _distribute(model, case.sharding, asked.outer)
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    tokens = torch.randint(0, VOCABULARY, (size.batch, size.length + 1), device=device)
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
    device = next(model.parameters()).device
    if sharding.startswith("fsdp1"):
        policy = ModuleWrapPolicy({Inside})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)
    _wrap(model, outer, FullyShardedDataParallel if sharding == "fsdp1-outside" else Inside)
    if sharding == "fsdp2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*model.get_submodule("layers").children(), model):
            fully_shard(module, mesh=mesh)
    if sharding == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return model


def _wrap(model: nn.Module, variant: Variant, kind: type[nn.Module]) -> None:
    if variant is None:
        return
    implementation = CheckpointImpl.REENTRANT if variant == "R" else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
        check_fn=lambda module: isinstance(module, kind) and module is not model,
    )
