"""The same with a trainable head: nothing raises, and the block is never trained."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)  # type: ignore[no-any-return]


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randint(0, 16, (4,))).sum().backward()
    optimizer.step()
