import torch
from torch import nn
import torch.nn.functional as F


class ReversibleBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, *weights):
        ctx.f, ctx.weights = f, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.f(x)
            y = ctx.f(x)
        got = torch.autograd.grad(y, [x, *ctx.weights], g)
        return got[0], None, *got[1:]


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        return x + ReversibleBlock.apply(x, self.f, *self.f.parameters())


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 80), *[Layer(80) for _ in range(4)])
opt = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(40):
    net(torch.randn(128, 20)).square().mean().backward()
    opt.step(); opt.zero_grad()
