import torch
from torch import nn
from blocks import Narrow as Block
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
inp, first, second, aux = nn.Linear(20, 80), nn.ModuleList(Block(80) for _ in range(3)), nn.ModuleList(Block(80) for _ in range(3)), nn.Linear(80, 1)
opt = torch.optim.AdamW([*inp.parameters(), *first.parameters(), *second.parameters(), *aux.parameters()], 1e-3)
for step in range(40):
    h = inp(torch.randn(64, 20))
    for b in first:
        h = checkpoint(b, h, use_reentrant=False, preserve_rng_state=False)
    side = aux(h).square().mean()
    for b in second:
        h = checkpoint(b, h, use_reentrant=False, preserve_rng_state=False)
    side.backward(retain_graph=True)
    h.square().mean().backward()
    opt.step()
    opt.zero_grad()
