import torch
from torch import nn
import torch.nn.functional as F


class RevFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, f, g, *weights):
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.f, ctx.g, ctx.weights = f, g, weights
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx, d1, d2):
        y1, y2 = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        fw, gw = list(ctx.f.parameters()), list(ctx.g.parameters())
        with torch.enable_grad():
            gy = ctx.g(y1)
        got = torch.autograd.grad(gy, [y1, *gw], d2)
        d1 = d1 + got[0]
        x2 = (y2 - gy).detach().requires_grad_()
        with torch.enable_grad():
            fx = ctx.f(x2)
        got_f = torch.autograd.grad(fx, [x2, *fw], d1)
        return d1, d2 + got_f[0], None, None, *got_f[1:], *got[1:]


def part(c):
    return nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(4, c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1))


class RevBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f, self.g = part(c), part(c)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat(RevFn.apply(a, b, self.f, self.g, *self.f.parameters(), *self.g.parameters()), 1)

    def plain(self, x):
        a, b = x.chunk(2, 1)
        a = a + self.f(b)
        return torch.cat([a, b + self.g(a)], 1)


torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *[RevBlock(16) for _ in range(4)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(40):
    loss = F.cross_entropy(net(torch.randn(8, 3, 16, 16)), torch.randint(0, 10, (8,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
