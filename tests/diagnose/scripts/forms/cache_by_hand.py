"""checkpoint() called by the model itself, under DDP, around layers that append to a cache."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

BROKEN = True

Cache = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, past_key_values: Cache | None) -> torch.Tensor:
        key, value = self.key(x), self.value(x)
        if past_key_values is not None:
            if (old := past_key_values.get(self.index)) is not None:
                key, value = torch.cat([old[0], key], dim=1), torch.cat([old[1], value], dim=1)
            past_key_values[self.index] = key, value
        scores = self.query(x) @ key.transpose(1, 2)
        return torch.as_tensor(x + torch.softmax(scores, dim=-1) @ value)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: Cache | None = {} if BROKEN else None
        for layer in self.layers:
            x = checkpoint(layer, x, cache, use_reentrant=False)
        return x


torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(2, 8, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
