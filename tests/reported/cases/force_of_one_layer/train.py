import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.a = nn.Linear(d, d)
        s.b = nn.Linear(d, d)

    def forward(s, x):
        return s.b(torch.tanh(s.a(x)))


l = Layer(48)
opt = torch.optim.Adam(l.parameters(), 1e-3)
for step in range(40):
    x = torch.randn(24, 48, requires_grad=True)
    e = checkpoint(l, x, use_reentrant=False).sum()
    f = torch.autograd.grad(e, x, create_graph=True)[0]
    loss = e.square() + f.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
