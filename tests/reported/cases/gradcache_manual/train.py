import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.inp = nn.Linear(24, d)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return F.normalize(x, dim=-1)


torch.manual_seed(0)
left, right = Tower(), Tower()
opt = torch.optim.AdamW([*left.parameters(), *right.parameters()], 1e-3)
for step in range(40):
    a, b = torch.randn(48, 24).split(16), torch.randn(48, 24).split(16)
    with torch.no_grad():
        za, zb = torch.cat([left(p) for p in a]), torch.cat([right(p) for p in b])
    za.requires_grad_()
    zb.requires_grad_()
    F.cross_entropy(20 * za @ zb.T, torch.arange(48)).backward()
    for net, parts, z in ((left, a, za), (right, b, zb)):
        for p, g in zip(parts, z.grad.split(16)):
            (net(p) * g).sum().backward()
    opt.step()
    opt.zero_grad()
