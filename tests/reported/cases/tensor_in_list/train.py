import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Quantize(nn.Module):
    def __init__(self, d, n=32):
        super().__init__()
        self.proj, self.codes, self.back = nn.Linear(d, d), nn.Parameter(torch.randn(n, d)), nn.Linear(d, d)
        self.usage = [torch.zeros(n)]

    def forward(self, x):
        z = self.proj(x)
        i = torch.cdist(z, self.codes).argmin(-1)
        self.usage[0].add_(torch.bincount(i.flatten(), minlength=len(self.codes)).float())
        q = z + (self.codes[i] - z.detach())
        return x + self.back(q)


torch.manual_seed(0)
enc = nn.Linear(32, 64)
vqs = nn.ModuleList(Quantize(64) for _ in range(2))
opt = torch.optim.Adam([*enc.parameters(), *vqs.parameters()], 1e-3)
for step in range(40):
    x = enc(torch.randn(8, 16, 32))
    for vq in vqs:
        x = checkpoint(vq, x, use_reentrant=True)
    x.square().mean().backward()
    opt.step()
    opt.zero_grad()
