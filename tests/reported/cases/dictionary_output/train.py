import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
inp, a, b = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
opt = torch.optim.SGD([*inp.parameters(), *a.parameters(), *b.parameters()], 0.1)


def block(x):
    return torch.tanh(a(x)), {"aux": torch.tanh(b(x))}


for step in range(40):
    y, more = checkpoint(block, inp(torch.randn(32, 16)), use_reentrant=True)
    opt.zero_grad()
    (y.square().mean() + more["aux"].square().mean()).backward()
    opt.step()  # b gets no gradient, inp half of its own
