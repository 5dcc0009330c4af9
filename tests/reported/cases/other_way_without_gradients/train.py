import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(64, 64)
        s.b = nn.Linear(64, 64)

    def forward(s, x):
        x = torch.relu(s.a(x))
        return nn.functional.linear(
            x, s.b.weight, s.b.bias if torch.is_grad_enabled() else None
        ) + (
            0 if torch.is_grad_enabled() else s.b.bias
        )  # another, equal way to the same numbers without grad


inp = nn.Linear(64, 64)
net = nn.ModuleList(Block() for _ in range(3))
opt = torch.optim.SGD([*inp.parameters(), *net.parameters()], 0.1)
for step in range(40):
    h = inp(torch.randn(32, 64))
    for b in net:
        h = checkpoint(b, h, use_reentrant=True)
    opt.zero_grad()
    h.square().mean().backward()
    opt.step()
