"""A checkpoint wrapper around decoder layers that append to a cache: recomputes append again."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

BROKEN = True

torch.manual_seed(0)


class GrowingCache:
    """Keys of one layer, made longer by every call, as the caches of transformers are."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def append(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        old = self.keys.get(layer)
        self.keys[layer] = new if old is None else torch.cat([old, new], dim=1)
        return self.keys[layer]


class DecoderLayer(nn.Module):
    def __init__(self, index: int, width: int) -> None:
        super().__init__()
        self.index = index
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, past_key_values: GrowingCache | None) -> torch.Tensor:
        keys = self.key(x)
        if past_key_values is not None:
            keys = past_key_values.append(self.index, keys)
        scores = torch.softmax(self.query(x) @ keys.transpose(1, 2), dim=-1)
        out: torch.Tensor = x + scores @ keys
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=BROKEN)
        self.layers = nn.ModuleList(DecoderLayer(index, 16) for index in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = GrowingCache() if self.config.use_cache else None
        for layer in self.layers:
            x = layer(x, cache)
        return x


model = Decoder()
apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, DecoderLayer))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(2, 8, 16)).sum().backward()
    optimizer.step()
