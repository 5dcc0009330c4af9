import torch
from torch import nn
import torch.nn.functional as F


class Flow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, steps, *weights):
        with torch.no_grad():
            for s in steps:
                x = s.go(x)
        ctx.steps, ctx.weights = steps, weights
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        grads = {}
        for s in reversed(ctx.steps):
            with torch.no_grad():
                x = s.back(y)
            leaf = x.detach().requires_grad_()
            ws = list(s.parameters())
            with torch.enable_grad():
                out = s.go(leaf)
            got = torch.autograd.grad(out, [leaf, *ws], g)
            g = got[0]
            grads.update({id(w): v for w, v in zip(ws, got[1:])})
            y = x
        return g, None, *[grads[id(w)] for w in ctx.weights]


class Step(nn.Module):
    """invertible 1x1 (a matrix) and an affine coupling"""

    def __init__(self, c):
        super().__init__()
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(c, c))[0])
        self.net = nn.Sequential(nn.Linear(c // 2, 3 * c), nn.ReLU(), nn.Linear(3 * c, c))

    def go(self, x):
        a, b = (x @ self.mix).chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        return torch.cat([a, b * torch.exp(0.2 * torch.tanh(s)) + t], -1)

    def back(self, y):
        a, b = y.chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        return torch.cat([a, (b - t) * torch.exp(-0.2 * torch.tanh(s))], -1) @ torch.linalg.inv(self.mix)


torch.manual_seed(0)
flow = nn.ModuleList(Step(48) for _ in range(5))
opt = torch.optim.Adam(flow.parameters(), 1e-4)
for step in range(40):
    x = torch.randn(192, 48, requires_grad=True)
    z = Flow.apply(x, list(flow), *flow.parameters())
    z.square().mean().backward()
    opt.step(); opt.zero_grad()
