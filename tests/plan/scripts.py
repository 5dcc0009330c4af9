"""Models that checkpoint their layers by a switch of their own, one layer at a time.

The same script is what is planned for, and what a plan is tried on without recompute-scan:
``python tests/plan/scripts.py NAME [--recompute all|none|A,B~]``.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Step = Callable[[], None]
_ROWS = 20_000

# What a selective checkpoint keeps: the policy of today's, and what the others keep, "A~".
TODAYS_POLICY = [torch.ops.aten.addmm.default]
HEAVY = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Switched(nn.Module):
    """A model whose layers are checkpointed where their names are in ``on``, with the operators
    whose results are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on: dict[str, list[Any]] = {}
        #: Told of each result that is kept.
        self.tell: Callable[[Any], None] = lambda _: None

    def through(self, listed: str, *args: Tensor) -> Tensor:
        """The layers of one list, one after the other."""
        x: Any
        x, *rest = args
        for n, layer in enumerate(getattr(self, listed)):
            kept = self.on.get(f"{listed}.{n}")
            if kept is None:
                x = layer(x, *rest)
            elif kept:
                policy = functools.partial(self._policy, kept)
                contexts = functools.partial(create_selective_checkpoint_contexts, policy)
                x = checkpoint(layer, x, *rest, use_reentrant=False, context_fn=contexts)
            else:
                x = checkpoint(layer, x, *rest, use_reentrant=False)
        out: Tensor = x
        return out

    def _policy(self, kept: list[Any], ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.tell(getattr(ctx, "op_output", None))
        return CheckpointPolicy.MUST_SAVE

    def names(self) -> list[str]:
        """All layers that have a switch."""
        return [
            f"{name}.{n}"
            for name, held in self.named_children()
            if isinstance(held, (nn.ModuleList, nn.Sequential))
            for n in range(len(held))
        ]


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), Mlp(width, hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.attention(x))
        return y


class Experts(nn.Module):
    """Each token goes to one of several experts."""

    def __init__(self, width: int, hidden: int, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, number)
        self.experts = nn.ModuleList(Mlp(width, hidden) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero().flatten()
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + out.view_as(x)


class Lora(nn.Module):
    def __init__(self, width: int, hidden: int, rank: int = 4) -> None:
        super().__init__()
        self.base = Block(width, hidden).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class Convolution(nn.Module):
    def __init__(self, channels: int, out: int = 0, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out or channels, 3, stride, 1)
        self.norm = nn.GroupNorm(4, out or channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(width), nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gru(self.norm(x))[0]
        return x + y


class Patches(nn.Conv2d):
    """What pictures are cut into, one row each."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).transpose(1, 2)


def encoder(dropout: float) -> Callable[[int], nn.Module]:
    """Makes torch's own layer of a width, with 16 heads."""
    return lambda w: nn.TransformerEncoderLayer(w, 16, 4 * w, dropout, "gelu", batch_first=True)


class Post(nn.Module):
    """Norms behind the layers, activations that save their results."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.down(self.up(x).relu()).tanh())
        return y


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


class Stack(Switched):
    """One list of layers between an embedding and a head."""

    def __init__(self, layers: list[nn.Module], width: int, *, sequential: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.Sequential(*layers) if sequential else nn.ModuleList(layers)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.through("layers", self.embedding(tokens)))
        return out


class Towers(Switched):
    """Two lists of layers with inputs of their own, and a common head."""

    def __init__(self, first: list[nn.Module], second: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.vision, self.text = nn.ModuleList(first), nn.ModuleList(second)
        self.head = nn.Linear(2 * width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        both = torch.cat([self.through("vision", x), self.through("text", x.flip(1))], -1)
        out: Tensor = self.head(both)
        return out


class Pictures(Switched):
    def __init__(self, layers: Sequence[nn.Module], channels: int, last: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(last, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.through("layers", self.stem(x)).mean((2, 3)))
        return out


@dataclass(frozen=True)
class PlanCase:
    """A script to plan for.

    Attributes:
        build: Makes the model.
        today: What it checkpoints: ``all``, ``none``, ``policy`` or the names of layers.
        shape: Of its tokens, or pictures.
        accumulate: Backward passes in a step.
        half: Whether it computes in bfloat16 by autocast.
        ranks: Processes; with two of them, FSDP2 shards it.
    """

    build: Callable[[], Switched]
    today: str = "all"
    shape: tuple[int, ...] = (4, 64)
    accumulate: int = 1
    half: bool = False
    ranks: int = 1
    pictures: bool = field(default=False)


def _blocks(number: int, width: int, hidden: int, dropout: float = 0.0) -> list[nn.Module]:
    return [Block(width, hidden, dropout) for _ in range(number)]


def _mlps(width: int, *hidden: int) -> list[nn.Module]:
    return [Mlp(width, size) for size in hidden]


CASES: dict[str, PlanCase] = {
    "transformer": PlanCase(lambda: Stack(_blocks(6, 128, 512), 128)),
    "transformer-none": PlanCase(lambda: Stack(_blocks(6, 128, 512), 128), today="none"),
    "mlp": PlanCase(lambda: Stack(_mlps(128, *[512] * 8), 128)),
    "mlp-uneven": PlanCase(lambda: Stack(_mlps(128, 128, 1024, 256, 512, 128, 2048), 128)),
    "uneven": PlanCase(
        lambda: Stack([Block(128, 128 * n) for n in (1, 8, 2, 4, 1, 6)], 128), today="none"
    ),
    "towers": PlanCase(lambda: Towers(_blocks(4, 128, 512), _mlps(128, *[256] * 4), 128)),
    "towers-half": PlanCase(
        lambda: Towers(_blocks(4, 96, 384), _blocks(3, 96, 192), 96),
        today="text.0,text.1,text.2",
    ),
    "moe": PlanCase(lambda: Stack([Experts(96, 384) for _ in range(5)], 96)),
    "moe-mixed": PlanCase(
        lambda: Stack([Experts(96, 192) if n % 2 else Block(96, 384) for n in range(6)], 96),
        today="none",
    ),
    "lora": PlanCase(lambda: Stack([Lora(128, 512) for _ in range(5)], 128)),
    "lora-none": PlanCase(lambda: Stack([Lora(96, 384) for _ in range(6)], 96), today="none"),
    "policy": PlanCase(lambda: Stack(_blocks(5, 128, 512), 128), today="policy"),
    "policy-mlp": PlanCase(lambda: Stack(_mlps(128, *[512] * 6), 128), today="policy"),
    "dropout": PlanCase(lambda: Stack(_blocks(5, 128, 512, 0.1), 128)),
    "post-norm": PlanCase(lambda: Stack([Post(128, 512) for _ in range(8)], 128)),
    "convolutions": PlanCase(
        lambda: Pictures([Convolution(32) for _ in range(6)], 32, 32),
        shape=(4, 3, 32, 32),
        pictures=True,
    ),
    "pyramid": PlanCase(
        lambda: Pictures(
            [
                Convolution(16, 16),
                Convolution(16, 32, 2),
                Convolution(32),
                Convolution(32, 64, 2),
                Convolution(64),
            ],
            16,
            64,
        ),
        shape=(4, 3, 48, 48),
        pictures=True,
        today="none",
    ),
    "recurrent": PlanCase(lambda: Stack([Recurrent(96) for _ in range(4)], 96), shape=(4, 32)),
    "accumulated": PlanCase(lambda: Stack(_blocks(5, 96, 384), 96), accumulate=2),
    "bfloat16": PlanCase(lambda: Stack(_blocks(4, 128, 512), 128), half=True, shape=(2, 64)),
    "deep": PlanCase(lambda: Stack(_blocks(16, 64, 256), 64)),
    "wide": PlanCase(lambda: Stack(_blocks(3, 256, 1024), 256)),
    "sequential": PlanCase(lambda: Stack(_blocks(5, 96, 384), 96, sequential=True), today="none"),
    # Large enough that two processes compute longer than they wait for each other.
    "fsdp2": PlanCase(lambda: Stack(_blocks(5, 128, 512), 128), ranks=2, shape=(12, 64)),
    "fsdp2-uneven": PlanCase(
        lambda: Towers(_blocks(3, 96, 384), _mlps(96, 96, 768, 192), 96),
        today="none",
        ranks=2,
        shape=(12, 64),
    ),
}


def build(case: PlanCase) -> tuple[Switched, Step]:
    """The model with its own switch as it is today, and one training step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = case.build()
    arrange(model, case.today)
    if case.ranks > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name in model.names():
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    batch = case.shape[0]
    inputs = torch.rand(case.shape) if case.pictures else torch.randint(0, 256, case.shape)
    target = torch.randint(0, 10, (batch,)) if case.pictures else inputs

    def step() -> None:
        for _ in range(case.accumulate):
            with torch.autocast("cpu", torch.bfloat16) if case.half else nullcontext():
                logits: Any = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def arrange(model: Switched, what: str) -> None:
    """Switch the checkpoints: ``all``, ``none``, ``policy`` or names with commas between, behind
    those of selective ones a tilde. What is inside a layer gets one around its ``forward``.
    """
    everything = model.names()
    known: dict[str, dict[str, list[Any]]] = {
        "all": {name: [] for name in everything},
        "policy": dict.fromkeys(everything, TODAYS_POLICY),
        "none": {},
    }
    named = {one.rstrip("~"): HEAVY if one.endswith("~") else [] for one in what.split(",")}
    model.on = known.get(what, named)
    for part in model.modules():
        vars(part).pop("forward", None)
    for name in model.on.keys() - set(everything):
        part = model.get_submodule(name)
        vars(part)["forward"] = functools.partial(checkpoint, part.forward, use_reentrant=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--recompute")
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    case = CASES[args.name]
    if case.ranks > 1:
        dist.init_process_group("gloo")
    model, step = build(case)
    if args.recompute:
        arrange(model, args.recompute)
    for _ in range(args.steps):
        step()


if __name__ == "__main__":
    main()
