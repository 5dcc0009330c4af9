import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, shards, h, y, params):
        ctx.fn, ctx.shards = fn, shards
        ctx.save_for_backward(h, y)
        with torch.no_grad():
            parts = [fn(a, b) for a, b in zip(h.chunk(shards, 1), y.chunk(shards, 1))]
        return torch.stack(parts).mean()

    @staticmethod
    def backward(ctx, g):
        h, y = ctx.saved_tensors
        out = torch.empty_like(h)
        at = 0
        for a, b in zip(h.chunk(ctx.shards, 1), y.chunk(ctx.shards, 1)):
            a = a.detach().requires_grad_()
            with torch.enable_grad():
                loss = ctx.fn(a, b)
            torch.autograd.backward(loss, g / ctx.shards)
            out[:, at:at + a.shape[1]] = a.grad
            at += a.shape[1]
        return None, None, out, None, None


torch.manual_seed(0)
body = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2)])
embed, head = nn.Embedding(600, 64), nn.Linear(64, 600, bias=False)
opt = torch.optim.AdamW([*body.parameters(), *embed.parameters(), *head.parameters()], 1e-3)
def token_loss(h, y): return F.cross_entropy(head(h).flatten(0, 1), y.flatten())
for step in range(40):
    ids = torch.randint(0, 600, (4, 64))
    loss = Sharded.apply(token_loss, 8, body(embed(ids)), ids, [head.weight])
    loss.backward()
    opt.step()
    opt.zero_grad()
