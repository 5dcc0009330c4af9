import torch
from torch import nn
from blocks import Block
from torch.utils.checkpoint import checkpoint



class Twice(nn.Module):
    def __init__(self, b):
        super().__init__()
        self.b = b

    def forward(self, x):
        return checkpoint(self.b, x, use_reentrant=True)

torch.manual_seed(0)
inp, blocks = nn.Linear(20, 72), nn.ModuleList(Twice(Block(72)) for _ in range(4))
opt = torch.optim.AdamW([*inp.parameters(), *blocks.parameters()], 1e-3)
for step in range(40):
    h = inp(torch.randn(96, 20))
    for b in blocks:
        h = checkpoint(b, h, use_reentrant=False)
    h.square().mean().backward(retain_graph=True)
    h.abs().mean().backward()
    opt.step(); opt.zero_grad()
