import torch
from torch import nn
import torch.nn.functional as F


class Group(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x, *weights):
        with torch.no_grad():
            y = module.chain(x)
        ctx.module, ctx.weights = module, weights
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        with torch.no_grad():
            x = ctx.module.solve(y)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module.chain(x)
        got = torch.autograd.grad(y, (x, *ctx.weights), grad)
        return None, *got


class GroupRev(nn.Module):
    def __init__(self, d, groups):
        super().__init__()
        w = d // groups
        self.parts = nn.ModuleList(nn.Sequential(nn.LayerNorm(w), nn.Linear(w, 4 * w), nn.ReLU(), nn.Linear(4 * w, w)) for _ in range(groups))

    def chain(self, x):
        xs = list(x.chunk(len(self.parts), -1))
        carry, ys = sum(xs[1:]), []
        for part, v in zip(self.parts, xs):
            carry = v + part(carry)
            ys.append(carry)
        return torch.cat(ys, -1)

    def solve(self, y):
        ys, xs = list(y.chunk(len(self.parts), -1)), []
        for i in range(len(ys) - 1, -1, -1):
            carry = ys[i - 1] if i else sum(xs)
            xs.append(ys[i] - self.parts[i](carry))
        return torch.cat(xs[::-1], -1)

    def forward(self, x):
        return Group.apply(self, x, *self.parameters())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 192), *[GroupRev(192, 4) for _ in range(4)], nn.Linear(192, 1))
opt = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(40):
    loss = model(torch.randn(128, 16)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
