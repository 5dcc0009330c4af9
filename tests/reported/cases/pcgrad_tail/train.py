import torch
from torch import nn
from blocks import Block
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
inp, trunk, heads = nn.Linear(20, 72), nn.ModuleList(Block(72) for _ in range(6)), nn.ModuleList(nn.Linear(72, 1) for _ in range(2))
opt = torch.optim.Adam([*inp.parameters(), *trunk.parameters(), *heads.parameters()], 1e-3)
tail = [p for b in trunk[3:] for p in b.parameters()]
for step in range(40):
    h = inp(torch.randn(64, 20))
    for b in trunk:
        h = checkpoint(b, h, use_reentrant=False)
    losses = [head(h).square().mean() for head in heads]
    per = [torch.autograd.grad(l, tail, retain_graph=True) for l in losses]
    sum(losses).backward()
    for p, g0, g1 in zip(tail, *per):
        dot = (g0 * g1).sum()
        if dot < 0:
            p.grad = g0 - dot / g1.square().sum() * g1 + g1 - dot / g0.square().sum() * g0
    opt.step(); opt.zero_grad()
