"""The parts of a module and their weights, as ``nn.Module`` lists them.

A module may be one that cannot be hashed (a dataclass that compares), which ``named_modules`` and
all that is made of it cannot list.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_parts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name below the root and module, itself first under an empty name, each module once."""
    met = {id(root)}
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        yield name, module
        inner = []
        for key, part in module._modules.items():
            if part is not None and id(part) not in met:
                met.add(id(part))
                inner.append((f"{name}.{key}" if name else key, part))
        waiting += reversed(inner)


def named_weights(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name below the root and parameter, each once."""
    met = set()
    for name, module in named_parts(root):
        for key, weight in module._parameters.items():
            if weight is not None and id(weight) not in met:
                met.add(id(weight))
                yield (f"{name}.{key}" if name else key), weight


def weights(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of its parts, each once."""
    return (weight for _, weight in named_weights(root))
