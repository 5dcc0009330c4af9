import torch
from torch import nn
from blocks import Block
from torch.utils.checkpoint import checkpoint


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
