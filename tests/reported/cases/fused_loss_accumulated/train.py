import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, head, y, n):
        ctx.head, ctx.n = head, n
        ctx.save_for_backward(h, y)
        with torch.no_grad():
            return sum(F.cross_entropy(head(a), b, reduction="sum") for a, b in zip(h.chunk(n), y.chunk(n))) / len(y)

    @staticmethod
    def backward(ctx, g):
        h, y = ctx.saved_tensors
        grads = []
        with torch.enable_grad():
            for a, b in zip(h.chunk(ctx.n), y.chunk(ctx.n)):
                a = a.detach().requires_grad_()
                (F.cross_entropy(ctx.head(a), b, reduction="sum") * (g / len(y))).backward()
                grads.append(a.grad)
        return torch.cat(grads), None, None, None


torch.manual_seed(0)
emb, head = nn.Embedding(400, 64), nn.Linear(64, 400)
blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
opt = torch.optim.AdamW([*emb.parameters(), *blocks.parameters(), *head.parameters()], 1e-3)
for step in range(40):
    for micro in range(2):
        ids = torch.randint(0, 400, (160,))
        x = emb(ids)
        for b in blocks:
            x = x + checkpoint(b, x, use_reentrant=False)
        (HeadLoss.apply(x, head, ids, 4) / 2).backward()
    opt.step(); opt.zero_grad()
