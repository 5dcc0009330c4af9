"""Two reentrant checkpoints whose blocks read one tensor that has a graph, by a closure."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

embed, first, second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
hidden = torch.randn(4, 8, requires_grad=True)
scale = embed(torch.randn(4, 8)).exp()


def scaled(layer: nn.Linear, x: Tensor) -> Tensor:
    out: Tensor = layer(x) * scale
    return out


for layer in (first, second):
    hidden = checkpoint(lambda x, layer=layer: scaled(layer, x), hidden, use_reentrant=True)
hidden.sum().backward()
