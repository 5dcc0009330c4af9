import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
net = nn.ModuleList(
    nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)
)
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(40):
    h = torch.randn(32, 64)
    for b in net:
        h = checkpoint(b, h, use_reentrant=False)
    loss = h.square().mean()
    g = torch.autograd.grad(loss, net[2][2].weight, retain_graph=True)[
        0
    ]  # a norm for a log, through the last block only
    opt.zero_grad()
    loss.backward()
    opt.step()
