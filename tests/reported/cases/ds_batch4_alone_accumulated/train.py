import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

class TiledMLP(torch.autograd.Function):
    """deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py"""

    @staticmethod
    def forward(ctx, fn, self, x, shards, compute_params):
        ctx.fn, ctx.self, ctx.shards = fn, self, shards
        ctx.compute_params = [p for p in compute_params if p.requires_grad]
        ctx.save_for_backward(x)
        x_shards = list(torch.chunk(x, chunks=shards, dim=-2))
        with torch.no_grad():
            output_shards = [fn(self, x_shard) for x_shard in x_shards]
        return torch.cat(output_shards, dim=-2)

    @staticmethod
    def backward(ctx, *grads):
        fn, self, shards = ctx.fn, ctx.self, ctx.shards
        (x,) = ctx.saved_tensors
        x_requires_grad = x.requires_grad
        x = x.detach()
        x.requires_grad_(x_requires_grad)
        hidden_size, x_shape_orig = x.shape[-1], x.shape
        x = x.reshape(-1, hidden_size)
        incoming_grad = grads[0].reshape(-1, hidden_size)
        x_grad = torch.zeros_like(x)
        x_shards = list(torch.chunk(x, chunks=shards, dim=0))
        for i, x_shard in enumerate(x_shards):
            for param in ctx.compute_params:
                param.ds_grad_is_ready = i + 1 == shards
            x_shard.requires_grad_(x_requires_grad)
            shard_step = x_shards[i].shape[0]
            shard_offset = i * x_shards[0].shape[0]
            x_shard.grad = x_grad.narrow(0, shard_offset, shard_step).view_as(x_shard)
            incoming_grad_shard = incoming_grad.narrow(0, shard_offset, shard_step).view_as(x_shard)
            with torch.enable_grad():
                output = fn(self, x_shard)
            torch.autograd.backward(output, incoming_grad_shard)
        return (None, None, x_grad.view(x_shape_orig), None, None)


def mlp_forward(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(d, 3 * d, bias=True), nn.Linear(d, 3 * d, bias=True), nn.Linear(3 * d, d, bias=True)
        self.shards = 3

    def forward(self, x):
        return TiledMLP.apply(mlp_forward, self, x, self.shards, [*self.parameters()])


class Layer(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.mlp = nn.Linear(d, 3 * d), nn.Linear(d, d), MLP(d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


torch.manual_seed(0)
model = nn.Sequential(*[Layer(96) for _ in range(3)])
opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
for step in range(40):
    for micro in range(2):
        x = torch.randn(4, 50, 96)
        (model(x).square().mean() / 2).backward()
    opt.step()
    opt.zero_grad()
