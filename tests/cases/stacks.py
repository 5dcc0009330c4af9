"""Stacks of other blocks: two kinds in turn, one shared, parts without gradients or precision."""

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .case import Build, Case, TrainingStep, full, none, partial
from .loops import batch, next_token_loss, updated
from .model import NON_REENTRANT, REENTRANT, WIDTH, Model, Oracle, Variant, run
from .watch import watch

N, R = NON_REENTRANT, REENTRANT


class Mixer(nn.Module):
    """A block of another kind: mixes tokens, then channels."""

    def __init__(self, oracle: Oracle, name: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.tokens = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.channels = nn.Linear(WIDTH, WIDTH)
        watch(oracle, self.tokens, name, "attention")
        watch(oracle, self.channels, name, "mlp")

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + F.silu(self.channels(mixed))


class Use(nn.Module):
    """One use of a layer that several uses share."""

    def __init__(self, oracle: Oracle, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        watch(oracle, self, name, "attention")
        watch(oracle, self, name, "mlp")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


class Assessed(nn.Module):
    """A layer and a statistic of it that no gradient needs, within one checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.probe = nn.Linear(WIDTH, 8)
        self.load = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.load.lerp_(self.probe(x).softmax(-1).mean((0, 1)), 0.1)
        result: Tensor = self.layer(x)
        return result


class Unmixed(nn.Module):
    """Switches autocast off for a layer, as is done for norms and routers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            result: Tensor = self.layer(x.float())
        return result


Shape = Literal["alternating", "shared", "assessed", "unmixed"]


def shaped(shape: Shape, variants: tuple[Variant | None, ...], autocast: bool = False) -> Build:
    """The model with its stack of layers changed.

    Args:
        shape: What the stack is made of.
        variants: Checkpoints of its blocks, in turn.
        autocast: In mixed precision.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle)
        layers: list[nn.Module] = list(model.layers)
        if shape == "alternating":
            layers[1::2] = [Mixer(oracle, f"mixers.{i}") for i in range(2)]
        elif shape == "shared":
            shared = Model(Oracle()).layers[0]
            layers = [Use(oracle, f"uses.{i}", shared) for i in range(4)]
        elif shape == "assessed":
            layers = [Assessed(layer) for layer in model.layers]
        else:
            layers[1::2] = [Unmixed(layer) for layer in layers[1::2]]
        model.layers = nn.ModuleList(layers)
        model.to(device)
        tokens = batch(device)
        asked = [variants[i % len(variants)] for i in range(len(layers))]

        def gradients() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                x: Tensor = model.embedding(tokens)
                for variant, layer in zip(asked, layers, strict=True):
                    x = run(variant, layer, x)
                loss = next_token_loss(model.logits(x), tokens)
            loss.backward()

        return updated(model.parameters(), gradients)

    return build


STACKS = (
    full(
        "alternating_n",
        "Two kinds of block in turn, all checkpointed.",
        shaped("alternating", (N,)),
    ),
    full("alternating_r", "The same, reentrant.", shaped("alternating", (R,))),
    Case(
        "alternating_first_kind",
        "Only blocks of the first kind are checkpointed.",
        None,
        shaped("alternating", (N, None)),
    ),
    full(
        "alternating_variants", "One kind reentrant, the other not.", shaped("alternating", (N, R))
    ),
    none("shared_none", "One layer used four times.", shaped("shared", (None,))),
    full("shared_n", "The same, checkpointed at each use.", shaped("shared", (N,))),
    full("shared_r", "The same, reentrant.", shaped("shared", (R,))),
    partial(
        "shared_some",
        "One layer used four times, checkpointed at every other use.",
        shaped("shared", (N, None)),
    ),
    none(
        "no_grad_part_none", "Each block has a part without gradients.", shaped("assessed", (None,))
    ),
    full("no_grad_part_n", "The same, checkpointed.", shaped("assessed", (N,))),
    full("no_grad_part_r", "The same, reentrant.", shaped("assessed", (R,))),
    none(
        "nested_autocast_none",
        "Every other layer leaves mixed precision.",
        shaped("unmixed", (None,), autocast=True),
    ),
    full("nested_autocast_n", "The same, checkpointed.", shaped("unmixed", (N,), autocast=True)),
    full("nested_autocast_r", "The same, reentrant.", shaped("unmixed", (R,), autocast=True)),
)
