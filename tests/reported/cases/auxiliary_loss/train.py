import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
net = nn.ModuleList(
    nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)
)
heads = nn.ModuleList(nn.Linear(64, 4) for _ in range(2))
opt = torch.optim.SGD([*net.parameters(), *heads.parameters()], 0.1)
for step in range(40):
    h = torch.randn(32, 64)
    for b in net:
        h = checkpoint(b, h, use_reentrant=False)
    opt.zero_grad()
    heads[0](h).square().mean().backward(
        retain_graph=True, inputs=list(net[2].parameters())
    )  # an auxiliary loss for the last block alone
    heads[1](h).square().mean().backward()
    opt.step()
