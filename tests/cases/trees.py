"""Checkpoints nested in any way around parts that run one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from torch import Tensor

from .model import NON_REENTRANT, REENTRANT, Variant, run

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Under:
    """A checkpoint around a tree."""

    variant: Variant
    inside: Tree

    def __str__(self) -> str:
        return f"{self.variant[0].upper()}({shown(self.inside)})"


# A part by its number, a checkpoint, or several of these in order.
Tree = int | Under | tuple["Tree", ...]


def run_tree(tree: Tree, parts: Sequence[Part], x: Tensor) -> Tensor:
    """The parts that the tree names, in its order, under its checkpoints."""
    if isinstance(tree, int):
        return parts[tree](x)
    if isinstance(tree, Under):
        inside = tree.inside
        return run(tree.variant, lambda y: run_tree(inside, parts, y), x)
    for child in tree:
        x = run_tree(child, parts, x)
    return x


def shown(tree: Tree) -> str:
    """``R(0 N(1))``, say."""
    return " ".join(map(shown, tree)) if isinstance(tree, tuple) else str(tree)


def under(variants: str, tree: Tree) -> Tree:
    """The tree under checkpoints, outermost first: ``"RN"`` is reentrant around non-reentrant."""
    for letter in reversed(variants):
        tree = Under(REENTRANT if letter == "R" else NON_REENTRANT, tree)
    return tree


def equal_layers(
    count: int, layer: str, stack: str = "", halves: tuple[str, str] = ("", "")
) -> Tree:
    """Layers of two parts each, all under the same checkpoints, and checkpoints around them all."""
    return under(
        stack,
        tuple(
            under(layer, tuple(under(half, 2 * n + at) for at, half in enumerate(halves)))
            for n in range(count)
        ),
    )


def random_tree(random: Random, parts: Sequence[Tree], depth: int) -> Tree:
    """A tree over these parts, in order, of at most that many levels."""
    if depth == 0 or random.random() < 0.15:
        return tuple(parts)
    if random.random() < 0.55:
        return under(random.choice("RN"), random_tree(random, parts, depth - 1))
    if len(parts) == 1:
        return random_tree(random, parts, depth - 1)
    at = random.randint(1, len(parts) - 1)
    pieces = [parts[:at], parts[at:]] if random.random() < 0.5 else [[part] for part in parts]
    if random.random() < 0.6:  # all alike, as far as they are
        seed = random.random()
        return tuple(random_tree(Random(seed), piece, depth - 1) for piece in pieces)
    return tuple(random_tree(random, piece, depth - 1) for piece in pieces)
