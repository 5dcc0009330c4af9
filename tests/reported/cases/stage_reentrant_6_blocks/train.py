import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def body(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=True)


torch.manual_seed(0)
stem = nn.Linear(16, 96)
stages = nn.ModuleList(nn.Sequential(*[Block(96) for _ in range(6)]) for _ in range(2))
opt = torch.optim.SGD([*stem.parameters(), *stages.parameters()], 0.01)
for step in range(40):
    x = stem(torch.randn(512, 16))
    for stage in stages:
        x = checkpoint(stage, x, use_reentrant=True)
    x.square().mean().backward()
    opt.step()
    opt.zero_grad()
