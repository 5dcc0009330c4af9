import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, self, x, shards, compute_params):
        ctx.fn, ctx.self, ctx.shards, ctx.compute_params = fn, self, shards, [p for p in compute_params if p.requires_grad]
        ctx.save_for_backward(x)
        with torch.no_grad():
            output_shards = [fn(self, s) for s in torch.chunk(x, chunks=shards, dim=1)]
        return torch.cat(output_shards, dim=1)

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        needs = x.requires_grad
        x = x.detach().requires_grad_(needs)
        x_grad = torch.zeros_like(x)
        x_shards = list(torch.chunk(x, chunks=ctx.shards, dim=1))
        kept, total = {}, {}
        for p in ctx.compute_params:
            kept[p], total[p], p.grad = p.grad, torch.zeros_like(p), None
        step = x_shards[0].numel()
        for i, s in enumerate(x_shards):
            s.requires_grad_(needs)
            s.grad = x_grad.view(-1).narrow(0, i * step, s.numel()).view_as(s)
            g = grads[0].reshape(-1).narrow(0, i * step, s.numel()).view_as(s)
            with torch.enable_grad():
                output = ctx.fn(ctx.self, s)
            torch.autograd.backward(output, g)
            for p in ctx.compute_params:
                if p.grad is not None:
                    total[p].add_(p.grad.detach())
                    p.grad = None
        for p in ctx.compute_params:
            p.grad = total[p] if kept[p] is None else kept[p] + total[p]
        return None, None, x_grad, None, None


class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return TiledMLP.apply(MLP.plain, self, x, 4, list(self.parameters()))

    def plain(self, x):
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(d), nn.Conv1d(d, d, 3, padding=1), MLP(d)

    def forward(self, x):
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, d=96, n=3):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(50, d), nn.ModuleList(Layer(d) for _ in range(n)), nn.Linear(d, 50)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


torch.manual_seed(0)
model = Model()
opt = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(40):
    ids = torch.randint(0, 50, (1, 128))
    F.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).backward()
    opt.step()
    opt.zero_grad()
