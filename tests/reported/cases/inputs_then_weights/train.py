import torch
from torch import nn
from blocks import Narrow as Block
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
blocks = nn.ModuleList(Block(80) for _ in range(3))
opt = torch.optim.SGD(blocks.parameters(), 0.05)
for step in range(40):
    x = torch.randn(64, 80, requires_grad=True)
    h = x
    for b in blocks:
        h = checkpoint(b, h, use_reentrant=False)
    loss = h.square().mean()
    torch.autograd.backward(loss, inputs=[x], retain_graph=True)
    for i in reversed(range(3)):
        torch.autograd.backward(loss, inputs=list(blocks[i].parameters()), retain_graph=i > 0)
    opt.step()
    opt.zero_grad()
