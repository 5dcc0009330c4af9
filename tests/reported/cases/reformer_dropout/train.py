import torch
from torch import nn
import torch.nn.functional as F


class Deterministic(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.state = net, None

    def forward(self, x, keep=False, again=False):
        if keep:
            self.state = torch.get_rng_state()
        if not again:
            return self.net(x)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            return self.net(x)


class Attention(nn.Module):
    def __init__(self, d, h=4):
        super().__init__()
        self.h, self.norm, self.qkv, self.o, self.drop = h, nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Dropout(0.1)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        return self.drop(self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)))


class Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            for f, g in layers:
                a = a + f(b, keep=True)
                b = b + g(a, keep=True)
        ctx.y, ctx.layers = (a.detach(), b.detach()), layers
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx, grad):
        (a, b), (da, db) = ctx.y, grad.chunk(2, -1)
        for f, g in reversed(ctx.layers):
            a.requires_grad_()
            with torch.enable_grad():
                ga = g(a, again=True)
                torch.autograd.backward(ga, db)
            with torch.no_grad():
                b = (b - ga).detach()
                da, a = da + a.grad, a.detach()
            b.requires_grad_()
            with torch.enable_grad():
                fb = f(b, again=True)
                torch.autograd.backward(fb, da)
            with torch.no_grad():
                a = (a - fb).detach()
                db, b = db + b.grad, b.detach()
        return torch.cat([da, db], -1), None


class Reformer(nn.Module):
    def __init__(self, d=64, depth=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, d), nn.Linear(2 * d, 50)
        self.f = nn.ModuleList(Deterministic(Attention(d)) for _ in range(depth))
        self.g = nn.ModuleList(Deterministic(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1))) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(Stack.apply(torch.cat([x, x], -1), list(zip(self.f, self.g))))


torch.manual_seed(0)
model = Reformer()
opt = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(40):
    ids = torch.randint(0, 50, (4, 32))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    opt.zero_grad()
