import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        h = F.relu(self.a(x))
        return x + self.b(h), {"alive": (h > 0).float().mean().detach(), "n": h.shape[-1]}


torch.manual_seed(0)
inp, blocks = nn.Linear(16, 80), nn.ModuleList(Block(80) for _ in range(3))
opt = torch.optim.Adam([*inp.parameters(), *blocks.parameters()], 1e-3)
for step in range(40):
    x, log = inp(torch.randn(64, 16)), []
    for b in blocks:
        x, info = checkpoint(b, x, use_reentrant=True)
        log.append(float(info["alive"]))
    x.square().mean().backward()
    opt.step(); opt.zero_grad()
