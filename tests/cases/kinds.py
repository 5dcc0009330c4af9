"""Layers of two kinds, a stem and a head of the layers' kernels, and forward passes beside the one
that is trained: what people have who checkpoint a part of a model, or roll it out first.

Attention is taken apart, as people write it who add something to the scores. In a recommender the
embeddings alone have kernels whose names tell their direction, and no product.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .case import Build, Case, TrainingStep
from .model import NON_REENTRANT, REENTRANT, Oracle, Variant, run

N, R = NON_REENTRANT, REENTRANT
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, LAYERS = 64, 32, 4, 12, 2, 3


class Mixer(nn.Module):
    """A layer without attention: mixes positions, then widths."""

    def __init__(self, oracle: Oracle, name: str, inner: Variant | None) -> None:
        super().__init__()
        self.oracle, self.name, self.inner = oracle, name, inner
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.across = nn.Sequential(nn.Linear(LENGTH, 32), nn.GELU(), nn.Linear(32, LENGTH))
        self.along = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return run(self.inner, self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        self.oracle.enter(self.name, "attention", self.training)
        x = x + self.across(self.norms[0](x).mT).mT
        self.oracle.enter(self.name, "mlp", self.training)
        result: Tensor = x + self.along(self.norms[1](x))
        return result


class Attending(nn.Module):
    """A transformer's layer, with its scores in the open."""

    def __init__(self, oracle: Oracle, name: str, inner: Variant | None) -> None:
        super().__init__()
        self.oracle, self.name, self.inner = oracle, name, inner
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return run(self.inner, self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        self.oracle.enter(self.name, "attention", self.training)
        qkv = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT / 3.0).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        self.oracle.enter(self.name, "mlp", self.training)
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


class Model(nn.Module):
    """A stem, mixers, attending layers, a head; ``outer`` has the checkpoints of either kind."""

    def __init__(
        self, oracle: Oracle, outer: tuple[Variant | None, Variant | None], inner: Variant | None
    ) -> None:
        super().__init__()
        self.outer = outer
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.stem = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.mixers = nn.ModuleList(Mixer(oracle, f"mixers.{i}", inner) for i in range(LAYERS))
        self.layers = nn.ModuleList(Attending(oracle, f"layers.{i}", inner) for i in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.logits(self.trunk(tokens))
        return result

    def trunk(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.stem(self.embedding(tokens))
        kinds: Iterable[tuple[Variant | None, nn.ModuleList]]
        kinds = zip(self.outer, (self.mixers, self.layers), strict=True)
        for variant, layers in kinds:
            for layer in layers:
                x = run(variant if self.training else None, layer, x)
        result: Tensor = self.norm(self.head(x))
        return result


def trained(
    mixers: Variant | None = None,
    layers: Variant | None = None,
    inner: Variant | None = None,
    *,
    chunks: Variant | None = None,
    rolled_out: bool = False,
    passes: int = 1,
) -> Build:
    """Trains it on random tokens.

    Args:
        mixers: Checkpoint around each mixer.
        layers: Around each attending layer.
        inner: Each layer's own.
        chunks: Around head and loss, in four pieces.
        rolled_out: The model runs once without gradients before.
        passes: Forward passes, each with its backward pass, per step.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle, (mixers, layers), inner).to(device).train()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)

        def piece(x: Tensor, wanted: Tensor) -> Tensor:
            for part in ("attention", "mlp") if chunks else ():
                oracle.enter("loss", part, model.training)
            return F.cross_entropy(model.logits(x).flatten(0, 1), wanted.flatten())

        def loss() -> Tensor:
            if chunks is None:
                return piece(model.trunk(tokens), tokens)
            pieces = zip(model.trunk(tokens).chunk(4, 1), tokens.chunk(4, 1), strict=True)
            losses = [run(chunks, partial(piece, wanted=wanted), part) for part, wanted in pieces]
            return torch.stack(losses).sum()

        def step() -> None:
            if rolled_out:
                model.eval()
                with torch.no_grad():
                    model(tokens)
                model.train()
            for _ in range(passes):
                loss().backward()
                adamw.step()
                adamw.zero_grad()

        return step

    return build


class Perceptron(nn.Module):
    """Products with ReLU between them."""

    def __init__(self, oracle: Oracle, name: str, *widths: int) -> None:
        super().__init__()
        self.oracle, self.name = oracle, name
        self.products = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: Tensor) -> Tensor:
        for part in ("attention", "mlp"):
            self.oracle.enter(self.name, part, self.training)
        for product in self.products[:-1]:
            x = F.relu(product(x))
        result: Tensor = self.products[-1](x)
        return result


def recommender(outer: Variant | None = None, inner: Variant | None = None) -> Build:
    """Embedding bags between two perceptrons, which are checkpointed."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        bags = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(4))
        bottom = Perceptron(oracle, "bottom", 8, 32, 16)
        top = Perceptron(oracle, "top", 80, 32, 16, 1)
        sgd = torch.optim.SGD(nn.ModuleList([bags, bottom, top]).to(device).parameters(), lr=0.01)
        dense = torch.randn(6, 8, device=device, requires_grad=True)
        items = torch.randint(50, (6, 3), device=device)

        def call(layer: Perceptron, x: Tensor) -> Tensor:
            return run(outer, partial(run, inner, layer), x)

        def step() -> None:
            features = torch.cat([call(bottom, dense), *(bag(items) for bag in bags)], 1)
            call(top, features).square().mean().backward()
            sgd.step()
            sgd.zero_grad()

        return step

    return build


def _case(name: str, about: str, verdict: str, build: Build, micro_batches: int = 1) -> Case:
    return Case(f"kinds_{name}", about, verdict, build, micro_batches)  # type: ignore[arg-type]


_ROLLED = "The model runs without gradients before; two passes, each with its optimizer step"
KINDS = (
    _case("none", "Nothing is checkpointed.", "none", trained()),
    _case("first_n", "The first kind is.", "partial", trained(N)),
    _case("second_n", "The second kind is.", "partial", trained(None, N)),
    _case("second_r", "The same, reentrant.", "partial", trained(None, R)),
    _case("both_n", "Both are.", "full", trained(N, N)),
    _case("both_r", "The same, reentrant.", "full", trained(R, R)),
    _case("both_r_in_n", "Both are, twice.", "doubled", trained(N, N, R)),
    _case("loss_n", "Head and loss in chunks are, and no layer.", "partial", trained(chunks=N)),
    _case("all_n", "The same, and all layers.", "full", trained(N, N, chunks=N)),
    _case("rolled_out", f"{_ROLLED}.", "none", trained(rolled_out=True, passes=2), 2),
    _case("rolled_out_n", f"{_ROLLED}.", "full", trained(N, N, rolled_out=True, passes=2), 2),
    _case("rolled_out_r_in_r", f"{_ROLLED}; doubled.", "doubled",
          trained(R, R, R, rolled_out=True, passes=2), 2),
    _case("recommender", "Embeddings and perceptrons.", "none", recommender()),
    _case("recommender_n", "Its perceptrons are.", "full", recommender(N)),
    _case("recommender_n_in_r", "Its perceptrons are, twice.", "doubled", recommender(R, N)),
)  # fmt: skip
