# DeepSpeed!7664, Liger!935: a tiled MLP that runs its forward again, inside a checkpointed layer
from common import *
from torch.utils.checkpoint import checkpoint


class Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, x, shards, *ps):
        ctx.fn, ctx.shards = fn, shards
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([fn(t) for t in x.chunk(shards, 1)], 1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        gx = []
        for t, gt in zip(x.detach().chunk(ctx.shards, 1), g.chunk(ctx.shards, 1)):
            t = t.detach().requires_grad_()
            with torch.enable_grad():
                o = ctx.fn(t)
            torch.autograd.backward(o, gt)
            gx.append(t.grad)
        return None, torch.cat(gx, 1), None, *[None] * (len(ctx.needs_input_grad) - 3)


class TiledMLP(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.inner = MLP(d)

    def forward(s, x):
        return Tiled.apply(s.inner, x, 4, *s.inner.parameters())


blocks = nn.ModuleList([Block(256) for _ in range(4)])
for b in blocks:
    b.mlp = TiledMLP(256)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.layers = blocks

    def forward(s, x):
        for b in s.layers:
            x = checkpoint(b, x, use_reentrant=False)
        return x


train(M())
