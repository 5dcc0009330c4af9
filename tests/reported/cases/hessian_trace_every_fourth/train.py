import torch
from torch import nn
from blocks import Block
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
inp, blocks = nn.Linear(20, 72), nn.ModuleList(Block(72) for _ in range(4))
opt = torch.optim.SGD([*inp.parameters(), *blocks.parameters()], 0.01)
w = blocks[3].down.weight
for step in range(44):
    h = inp(torch.randn(64, 20))
    for b in blocks:
        h = checkpoint(b, h, use_reentrant=False)
    loss = h.pow(4).mean()
    if step % 4 == 0:
        g = torch.autograd.grad(loss, w, create_graph=True)[0]
        v = torch.randn_like(w).sign()
        hv = torch.autograd.grad((g * v).sum(), w, retain_graph=True)[0]
        print(step, float((hv * v).sum()))
    loss.backward()
    opt.step(); opt.zero_grad()
