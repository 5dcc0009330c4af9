"""Equal layers, all checkpointed alike, with early stop and without.

Where early stop is off, one node's sequence of operators can be one recompute of two layers or two
recomputes of one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from .case import Build, TrainingStep, doubled, full
from .loops import batch, next_token_loss, updated
from .model import LAYERS, Checkpoints, Layer, Model, Oracle
from .trees import Tree, equal_layers, run_tree

LETTERS = {"r": "R", "n": "N"}


def layered(tree: Tree, early_stop: bool = False, models: int = 1, micro_batches: int = 1) -> Build:
    """The ordinary step, with its layers, in halves, under the checkpoints of a tree.

    Args:
        tree: Over the halves of the layers, numbered through; they are as many as it names.
        early_stop: Torch's default is on.
        models: Each with a loss of its own; one update for all.
        micro_batches: Per step.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        trained = []
        for number in range(models):
            prefix = f"models.{number}." if models > 1 else ""
            model = Model(oracle, prefix=prefix)
            more = [
                Layer(oracle, f"{prefix}layers.{at}", None, Checkpoints())
                for at in range(LAYERS, _parts(tree) // 2)
            ]
            model.layers = nn.ModuleList([*model.layers, *more])
            trained.append(model.to(device))
        tokens = batch(device)

        def gradients() -> None:
            for model in trained * micro_batches:
                halves: list[Any] = [
                    half for layer in model.layers for half in (layer.attention, layer.mlp)
                ]
                x: Tensor = model.embedding(tokens)
                with set_checkpoint_early_stop(early_stop):
                    x = run_tree(tree, halves, x)
                next_token_loss(model.logits(x), tokens).backward()

        return updated([p for model in trained for p in model.parameters()], gradients)

    return build


def _parts(tree: Tree) -> int:
    """One more than the highest part."""
    if isinstance(tree, int):
        return tree + 1
    return max(map(_parts, tree)) if isinstance(tree, tuple) else _parts(tree.inside)


EQUAL = (
    *(
        doubled(
            f"n_in_n_late_{count}",
            f"{count} equal layers under two non-reentrant checkpoints, early stop off.",
            layered(equal_layers(count, "NN")),
        )
        for count in range(1, 9)
    ),
    *(
        doubled(
            f"{inner}_in_{outer}_late_2",
            "Two equal layers under that pair, early stop off.",
            layered(equal_layers(2, LETTERS[outer] + LETTERS[inner])),
        )
        for outer, inner in ("rr", "rn", "nr")
    ),
    full(
        "n_in_n_early_2",
        "Two equal layers under two non-reentrant checkpoints: early stop saves the second.",
        layered(equal_layers(2, "NN"), early_stop=True),
    ),
    doubled(
        "n_three_levels_late_2",
        "Three checkpoints around each of two equal layers.",
        layered(equal_layers(2, "NNN")),
    ),
    doubled(
        "n_halves_in_n_late_3",
        "Each half of three equal layers, and each layer.",
        layered(equal_layers(3, "N", halves=("N", "N"))),
    ),
    doubled(
        "n_in_n_late_in_n_stack",
        "Two around each of four equal layers, and two around all.",
        layered(equal_layers(4, "NN", stack="NN")),
    ),
    doubled(
        "n_in_n_late_in_r_stack",
        "Two around each of three equal layers, and a reentrant one around all.",
        layered(equal_layers(3, "NN", stack="R")),
    ),
    doubled(
        "n_late_in_n_stack",
        "One around each of three equal layers, and one around all.",
        layered(equal_layers(3, "N", stack="N")),
    ),
    doubled(
        "r_round_n_late_in_n_stack",
        "One of each kind around each of five equal layers, and one around all.",
        layered(equal_layers(5, "NR", stack="N")),
    ),
    doubled(
        "n_in_n_late_accumulation",
        "One layer, whose equal stands in the micro-batch before.",
        layered(equal_layers(1, "NN"), micro_batches=2),
        micro_batches=2,
    ),
    doubled(
        "n_in_n_late_two_models",
        "Two models of two equal layers, one after the other.",
        layered(equal_layers(2, "NN"), models=2),
        micro_batches=2,
    ),
)
