import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class LigerTiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, module, x, shards, compute_params=None):
        ctx.fn, ctx.module, ctx.shards = fn, module, shards
        ctx.save_for_backward(x)
        with torch.no_grad():
            parts = [fn(module, p) for p in torch.chunk(x, chunks=shards, dim=-2)]
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        needs, shape = x.requires_grad, x.shape
        x = x.detach()
        x.requires_grad_(needs)
        x = x.view(-1, shape[-1])
        incoming = grads[0].contiguous().view(-1, shape[-1])
        x_grad = torch.zeros_like(x)
        parts = list(torch.chunk(x, chunks=ctx.shards, dim=0))
        for i, part in enumerate(parts):
            part.requires_grad_(needs)
            n, at = parts[i].shape[0], i * parts[0].shape[0]
            part.grad = x_grad.narrow(0, at, n).view_as(part)
            g = incoming.narrow(0, at, n).view_as(part)
            with torch.enable_grad():
                output = ctx.fn(ctx.module, part)
            torch.autograd.backward(output, g)
        return None, None, x_grad.view(shape), None, None


class TiledGEGLU(nn.Module):
    def __init__(self, d, hidden, shards):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False), nn.Linear(hidden, d, bias=False)
        self.shards = shards

    def _mlp(self, module, x):
        return module.down_proj(F.gelu(module.gate_proj(x), approximate="tanh") * module.up_proj(x))

    def forward(self, x):
        return LigerTiled.apply(self._mlp, self, x, self.shards, [p for p in self.parameters() if p.requires_grad])

torch.manual_seed(0)
emb, norms, mlps = nn.Embedding(60, 80), nn.ModuleList(nn.LayerNorm(80) for _ in range(4)), nn.ModuleList(TiledGEGLU(80, 240, 5) for _ in range(4))
opt = torch.optim.AdamW([*emb.parameters(), *norms.parameters(), *mlps.parameters()], 1e-3)
def layer(i, x):
    return x + mlps[i](norms[i](x))
for step in range(40):
    x = emb(torch.randint(0, 60, (2, 72)))
    for i in range(4):
        x = checkpoint(layer, i, x, use_reentrant=True)
    x.square().mean().backward()
    opt.step(); opt.zero_grad()
