import torch
from torch import nn
import torch.nn.functional as F

from torch.utils.checkpoint import checkpoint


class Rev(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, f, *weights):
        with torch.no_grad():
            y = a + f(b)
        ctx.f, ctx.weights = f, weights
        ctx.save_for_backward(y, b)
        return y, b.clone()

    @staticmethod
    def backward(ctx, gy, gb):
        y, b = ctx.saved_tensors
        b = b.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.f(b)
        got = torch.autograd.grad(out, [b, *ctx.weights], gy)
        return gy, gb + got[0], None, *got[1:]


def mlp(d):
    return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))


class RevLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = mlp(d)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        y, b = Rev.apply(a, b, self.f, *self.f.parameters())
        return torch.cat([b, y], -1)


class Ordinary(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = mlp(d)

    def forward(self, x):
        return x + checkpoint(self.f, x, use_reentrant=True)


torch.manual_seed(0)
inp, revs, rest = nn.Linear(16, 96), nn.ModuleList(RevLayer(48) for _ in range(3)), nn.ModuleList(Ordinary(96) for _ in range(3))
opt = torch.optim.AdamW([*inp.parameters(), *revs.parameters(), *rest.parameters()], 1e-3)
for step in range(40):
    x = inp(torch.randn(128, 16))
    for r in revs:
        x = r(x)
    for b in rest:
        x = checkpoint(b, x, use_reentrant=False)
    x.square().mean().backward()
    opt.step()
    opt.zero_grad()
