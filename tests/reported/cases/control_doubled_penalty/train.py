import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(d, 3 * d), nn.SiLU(), nn.Linear(3 * d, d), nn.SiLU()), nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))

    def forward(self, x):
        h = checkpoint(self.first, x, use_reentrant=True)
        return x + self.second(h)


torch.manual_seed(0)
inp, blocks = nn.Linear(20, 80), nn.ModuleList(Block(80) for _ in range(3))
opt = torch.optim.AdamW([*inp.parameters(), *blocks.parameters()], 1e-3)
for step in range(40):
    h = inp(torch.randn(96, 20))
    for b in blocks:
        h = checkpoint(b, h, use_reentrant=False)
    loss = h.square().mean()
    (0.5 * loss).backward(retain_graph=True)
    norm = blocks[-1].second[2].weight.grad.norm().item()
    (0.5 * h.abs().mean()).backward()
    opt.step()
    opt.zero_grad()
