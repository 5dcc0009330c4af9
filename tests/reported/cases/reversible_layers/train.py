"""A reversible layer as torch_geometric.nn.GroupAddRev has it: an autograd function that keeps no
input, and in its backward first inverts (which runs F once, without gradients), then runs the layer
again with gradients. Nothing is checkpointed, nothing is switched on twice, nothing can be removed."""

import torch
from torch import nn


class Invertible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, inverse, x, *weights):
        ctx.fn, ctx.inverse, ctx.weights = fn, inverse, weights
        with torch.no_grad():
            y = fn(x.detach())
        ctx.y = y.detach()
        return y.detach()

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            x = ctx.inverse(ctx.y)
        with torch.set_grad_enabled(True):
            x = x.detach().requires_grad_()
            y = ctx.fn(x)
        grads = torch.autograd.grad(y, (x, *ctx.weights), grad)
        return None, None, *grads


class F(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.b(torch.relu(self.a(self.norm(x))))


class Rev(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f, self.g = F(d // 2), F(d // 2)

    def run(self, x):
        x1, x2 = x.chunk(2, -1)
        y1 = x1 + self.f(x2)
        return torch.cat([y1, x2 + self.g(y1)], -1)

    def inverse(self, y):
        y1, y2 = y.chunk(2, -1)
        x2 = y2 - self.g(y1)
        return torch.cat([y1 - self.f(x2), x2], -1)

    def forward(self, x):
        return Invertible.apply(self.run, self.inverse, x, *self.parameters())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 128), *[Rev(128) for _ in range(6)], nn.Linear(128, 1))
opt = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(30):
    x = torch.randn(256, 16)
    loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, f"{loss.item():.9f}")
