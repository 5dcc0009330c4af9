# miles!2862: a function's ctx and its node refer to each other; what was recomputed lives on after its layer's backward
from common import *
import gc
from torch.utils.checkpoint import checkpoint

gc.disable()


class Cyc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * torch.sigmoid(x)
        ctx.keep = y
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class CM(MLP):
    def forward(s, x):
        return s.b(Cyc.apply(s.a(x)))


bs = nn.ModuleList([Block(256) for _ in range(6)])
for b in bs:
    b.mlp = CM(256)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.layers = bs

    def forward(s, x):
        for b in s.layers:
            x = checkpoint(b, x, use_reentrant=False)
        return x


def step(m, x):
    return m(x).square().mean()


import sys

m = M()
opt = torch.optim.SGD(m.parameters(), lr=1e-3)
for i in range(40):
    step(m, torch.randn(4, 128, 256)).backward()
    opt.step()
    opt.zero_grad()
    if i % 10 == 9:
        gc.collect()
