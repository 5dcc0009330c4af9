import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LayerCheckpoint(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False, preserve_rng_state=False)


class StackCheckpoint(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def forward(self, x):
        return checkpoint(self.stack, x, use_reentrant=True)


torch.manual_seed(0)
inp = nn.Linear(16, 72)
net = StackCheckpoint(nn.Sequential(*[LayerCheckpoint(Block(72)) for _ in range(12)]))
opt = torch.optim.AdamW([*inp.parameters(), *net.parameters()], 1e-3)
for step in range(40):
    net(inp(torch.randn(384, 16))).square().mean().backward()
    opt.step(); opt.zero_grad()
