"""What ``prediction.py`` trains, checkpointed before and after a change: a transformer of any size,
or another kind of model.

Each case is a pair of arrangements of checkpoints around the same layers. The model is built twice
from the same seed, so both do the same work but for the recomputes.
"""

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
    Patches,
    Post,
    Recurrent,
    encoder,
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

    layer: Callable[[int], nn.Module]
    number: int
    width: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    patch: int = 0  # into what pictures are cut; 0 where they are not
    compiled: bool = False

    def build(self, asked: Asked, device: torch.device) -> tuple[nn.Module, Tensor]:
        """The model and its inputs."""
        pictures = len(self.shape) == 4
        stem: nn.Module = nn.Embedding(64, self.width)
        if self.patch:
            stem = Patches(3, self.width, self.patch, self.patch)
        elif pictures:
            stem = nn.Conv2d(3, self.width, 3, padding=1)
        layers = [self.layer(self.width) for _ in range(self.number)]
        for layer in layers if self.compiled else ():
            layer.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
        model = Layers(stem, layers, nn.Identity(), nn.Linear(self.width, 64), asked)
        model.outer = asked.outer
        model = model.to(device, self.dtype)
        if pictures:
            return model, torch.rand(self.shape, device=device, dtype=self.dtype)
        return model, torch.randint(0, 64, self.shape, device=device)


KINDS = {
    "convolutions": Kind(Convolution, 5, 32, (4, 3, 32, 32)),
    "convolutions, large": Kind(Convolution, 4, 64, (4, 3, 64, 64)),
    "recurrent": Kind(Recurrent, 3, 96, (4, 32)),
    "embeddings": Kind(Lookup, 3, 64, (4, 64)),
    "experts": Kind(lambda w: Experts(w, 4 * w), 4, 96, (4, 64)),
    "batch norms": Kind(Normed, 5, 32, (4, 3, 32, 32)),
    "lora": Kind(lambda w: Lora(w, 4 * w), 4, 128, (4, 64)),
    "post-norm": Kind(lambda w: Post(w, 4 * w), 6, 128, (4, 64)),
    "mlp, large": Kind(lambda w: Mlp(w, 4 * w), 4, 512, (4, 128)),
}


def _layer(width: int) -> nn.Module:
    return Layer(Size(layers=1, width=width, length=0, batch=0, heads=max(4, width // 64)))


# Each but the shortest fills a GPU.
HALF = torch.bfloat16
LARGE_KINDS = {
    "transformer": Kind(_layer, 8, 2048, (4, 2048), HALF),
    "short kernels": Kind(_layer, 24, 64, (2, 32), HALF),
    "dropout": Kind(encoder(0.1), 12, 1024, (32, 512), HALF),
    "patches": Kind(encoder(0.0), 12, 1024, (64, 3, 224, 224), HALF, patch=16),
    "large convolutions": Kind(Convolution, 8, 256, (32, 3, 64, 64)),
    "many experts": Kind(lambda w: Experts(w, 2 * w, 8), 4, 1024, (8, 1024), HALF),
    "large recurrent": Kind(Recurrent, 4, 512, (64, 256)),
    "compiled": Kind(_layer, 4, 1024, (8, 1024), HALF, compiled=True),
    "large lora": Kind(lambda w: Lora(w, 4 * w), 8, 1024, (8, 1024), HALF),
    "large embeddings": Kind(Lookup, 6, 1024, (16, 512), HALF),
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
# Three changes to one pair of checkpoints, for which each kind is recorded once.
LARGE = tuple(
    Case(f"{kind}, {change}", SMALL, R_IN_N, after, kind=kind)
    for kind in LARGE_KINDS
    for change, after in (("R removed", N), ("N removed", R), ("to none", NONE))
)


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
        pictures = isinstance(self.stem, nn.Conv2d)
        flat = x.mean((2, 3) if x.dim() == 4 else 1) if pictures else x
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
        kind = (KINDS | LARGE_KINDS)[case.kind]
        if case.kind in LARGE_KINDS and device.type == "cpu":
            shape = (2, *(min(size, 16) for size in kind.shape[1:]))
            kind = kind._replace(number=2, width=32, shape=shape, dtype=torch.float32)
        other, given = kind.build(asked, device)
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
