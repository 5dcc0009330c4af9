import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class OnceNorm(nn.BatchNorm1d):
    def forward(self, x):
        if not torch.is_grad_enabled():
            mean, var = x.mean(0), x.var(0, unbiased=False)
            return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias
        return super().forward(x)


torch.manual_seed(0)
inp = nn.Linear(20, 96)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 192), OnceNorm(192), nn.ReLU(), nn.Linear(192, 96)) for _ in range(3))
opt = torch.optim.SGD([*inp.parameters(), *blocks.parameters()], 0.01)
for step in range(40):
    x = inp(torch.randn(64, 20))
    for b in blocks:
        x = checkpoint(b, x, use_reentrant=True)
    x.square().mean().backward()
    opt.step()
    opt.zero_grad()
