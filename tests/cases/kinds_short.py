"""What stands beside checkpointed blocks and is much shorter: layers of its own kind, or none.

Layers are what attends to other positions or stands in a row of equal ones that are most of a
block; a stem, what pools or merges, and heads are none.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .case import Build, TrainingStep, doubled, full, partial
from .frameworks import Function
from .kinds import BATCH, HEADS, LENGTH, VOCABULARY, WIDTH, Attending
from .loops import updated
from .model import NON_REENTRANT, REENTRANT, Oracle, Variant, run


class Brief(nn.Module):
    """A layer of attention and nothing else; ``pools`` where it leaves one position."""

    def __init__(self, oracle: Oracle, name: str | None, *, pools: bool = False) -> None:
        super().__init__()
        self.oracle, self.name, self.pools = oracle, name, pools
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in ("attention", "mlp") if self.name else ():
            self.oracle.enter(str(self.name), part, self.training)
        qkv = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.pools:
            q = q[:, :, :1]
        result = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return result if self.pools else x + result


class Merge(nn.Module):
    """Two neighbours become one, as between the stages of a model of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.product(self.norm(torch.cat([x[:, ::2], x[:, 1::2]], -1)))
        return result


def _under(around: Sequence[Variant | None], layer: nn.Module) -> Function:
    call: Function = layer
    for variant in around:
        call = functools.partial(run, variant, call)
    return call


class Model(nn.Module):
    """Three blocks that are checkpointed, and what is before, between and behind them."""

    def __init__(self, oracle: Oracle, around: tuple[Variant | None, ...], beside: str) -> None:
        super().__init__()
        self.around, self.beside = around, beside
        layer = functools.partial(Brief, oracle)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.before, self.behind = nn.Sequential(), nn.Sequential()
        self.between = nn.ModuleList(nn.Identity() for _ in range(2))
        self.heads = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY)])
        if beside == "tower":
            self.before = nn.Sequential(*(layer(f"tower.{i}") for i in range(3)))
        elif beside == "stem":
            parts = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(3)]
            self.before = nn.Sequential(*(one for part in parts for one in part))
        elif beside == "between":
            self.between = nn.ModuleList(layer(f"between.{i}") for i in range(2))
        elif beside == "merges":
            self.between = nn.ModuleList(Merge() for _ in range(2))
        elif beside == "decoder":
            self.behind = nn.Sequential(layer("decoder.self"), layer("decoder.cross"))
        elif beside == "pool":
            self.behind = nn.Sequential(Brief(oracle, None, pools=True))
        elif beside == "heads":
            self.heads = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
                for _ in range(3)
            )
        self.layers = nn.ModuleList(Attending(oracle, f"layers.{i}", None) for i in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.before(self.embedding(tokens))
        for layer, behind in zip(self.layers, [*self.between, nn.Identity()], strict=True):
            x = behind(_under(self.around, layer)(x))
        x = self.behind(x)
        losses = [head(x).square().mean() for head in self.heads]
        return torch.stack(losses).sum()


def beside(what: str, *around: Variant | None) -> Build:
    """Trains a model with that beside its blocks, which have these checkpoints, inside first."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, around, what).to(device).train()
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)

        def gradients() -> None:
            model(tokens).backward()

        return updated(model.parameters(), gradients)

    return build


N, R = NON_REENTRANT, REENTRANT
KINDS_SHORT = (
    partial("short_tower_n", "A tower of short layers before.", beside("tower", N)),
    partial("short_tower_r", "The same, reentrant.", beside("tower", R)),
    partial("short_between_n", "Short layers between.", beside("between", N)),
    partial("short_decoder_n", "A decoder of two short ones.", beside("decoder", N)),
    doubled("short_tower_r_in_n", "Blocks twice.", beside("tower", R, N)),
    full("short_stem_n", "A stem of three equal pieces.", beside("stem", N)),
    full("short_merges_n", "Merges between blocks.", beside("merges", N)),
    full("short_pool_n", "Attention that pools.", beside("pool", N)),
    full("short_heads_n", "Three heads.", beside("heads", N)),
    full("short_heads_r", "The same, reentrant.", beside("heads", R)),
)
