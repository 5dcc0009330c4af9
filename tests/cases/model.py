"""A small transformer that can be checkpointed in every way, and counts its own runs."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .versions import keeping

Variant = Literal["reentrant", "non-reentrant"]
REENTRANT: Variant = "reentrant"
NON_REENTRANT: Variant = "non-reentrant"

LAYERS = 4
WIDTH = 32
HEADS = 2
LENGTH = 16
BATCH = 2
VOCABULARY = 64

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Oracle:
    """Counts entries of model parts. Adds no operator, so it leaves nothing in a trace."""

    def __init__(self) -> None:
        self.entries: Counter[tuple[str, str, str]] = Counter()
        self.kept: Counter[str] = Counter()

    def enter(self, layer: str, part: str, training: bool) -> None:
        # The id of the running backward pass (a "graph task"), or -1 outside any.
        if torch._C._current_graph_task_id() != -1:
            kind = "recomputes"
        else:
            kind = "forward" if training else "evaluation"
        self.entries[layer, part, kind] += 1

    def keep(self, operator: str) -> None:
        """A selective checkpoint keeps a result of that operator."""
        self.kept[operator] += 1

    def reset(self) -> None:
        self.entries.clear()
        self.kept.clear()


@dataclass(frozen=True)
class Checkpoints:
    """Which checkpoints to put around what. ``None`` is no checkpoint; all may be combined.

    Attributes:
        stack: Around all layers together.
        stack_with_head: ``stack`` covers the final norm and the head as well.
        sequential: ``checkpoint_sequential`` over the layers, in two segments.
        outer: Around each layer of ``outer_layers``, asked for by the model.
        inner: Around the same layers' own computation (``inner_layers``), asked for by the layer.
        attention: Around the attention half of each layer.
        mlp: Around the MLP half of each layer.
        selective: ``outer`` keeps the results of matrix products (non-reentrant only).
    """

    stack: Variant | None = None
    stack_with_head: bool = False
    sequential: Variant | None = None
    outer: Variant | None = None
    inner: Variant | None = None
    attention: Variant | None = None
    mlp: Variant | None = None
    outer_layers: frozenset[int] = frozenset(range(LAYERS))
    inner_layers: frozenset[int] = frozenset(range(LAYERS))
    selective: bool = False


def run(variant: Variant | None, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, under a checkpoint of that variant if there is one."""
    if variant is None:
        return function(x)
    with warnings.catch_warnings():
        # Said of every reentrant checkpoint whose input comes out of another's first run.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        result: Tensor = checkpoint(function, x, use_reentrant=variant == REENTRANT)
    return result


class Attention(nn.Module):
    def __init__(self, oracle: Oracle, layer: str) -> None:
        super().__init__()
        self.oracle = oracle
        self.layer = layer
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.oracle.enter(self.layer, "attention", self.training)
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return result


class Mlp(nn.Module):
    def __init__(self, oracle: Oracle, layer: str) -> None:
        super().__init__()
        self.oracle = oracle
        self.layer = layer
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.oracle.enter(self.layer, "mlp", self.training)
        result: Tensor = x + self.transform(self.norm(x))
        return result

    def transform(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Layer(nn.Module):
    def __init__(
        self, oracle: Oracle, name: str, inner: Variant | None, asked: Checkpoints
    ) -> None:
        super().__init__()
        self.inner = inner
        self.asked = asked
        self.attention = Attention(oracle, name)
        self.mlp = Mlp(oracle, name)

    def forward(self, x: Tensor) -> Tensor:
        return run(self.inner if self.training else None, self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        x = run(self.asked.attention, self.attention, x)
        return run(self.asked.mlp, self.mlp, x)


class Model(nn.Module):
    """Embedding, layers, norm, head. ``trunk`` stops before the norm.

    ``prefix`` goes before the layers' names, for cases with several models.
    """

    def __init__(self, oracle: Oracle, asked: Checkpoints | None = None, prefix: str = "") -> None:
        super().__init__()
        self.oracle = oracle
        self.asked = asked = asked or Checkpoints()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            Layer(
                oracle,
                f"{prefix}layers.{i}",
                asked.inner if i in asked.inner_layers else None,
                asked,
            )
            for i in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.asked.stack_with_head:
            return run(self.asked.stack, lambda y: self.logits(self.stack(y)), x)
        return self.logits(run(self.asked.stack if self.training else None, self.stack, x))

    def logits(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x))
        return result

    def stack(self, x: Tensor) -> Tensor:
        if self.asked.sequential is not None:
            result: Tensor = checkpoint_sequential(
                list(self.layers), 2, x, use_reentrant=self.asked.sequential == REENTRANT
            )
            return result
        for i, layer in enumerate(self.layers):
            variant = self.asked.outer if self.training and i in self.asked.outer_layers else None
            if self.asked.selective:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=self._selective_contexts)
            else:
                x = run(variant, layer, x)
        return x

    def _selective_contexts(self) -> Any:
        return keeping(MATMULS, self.oracle.keep)()
