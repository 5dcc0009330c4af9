import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from typing import NamedTuple


class Aux(NamedTuple):
    balance: torch.Tensor
    chosen: torch.Tensor


class Experts(nn.Module):
    def __init__(self, d=96, n=4):
        super().__init__()
        self.router, self.up, self.down = nn.Linear(d, n), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        y = x + self.down(F.silu(self.up(x)))
        return y, Aux(share.mean((0, 1)).square().sum(), share.argmax(-1))


class Net(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.inp, self.layers, self.out = nn.Linear(32, d), nn.ModuleList(Experts(d) for _ in range(3)), nn.Linear(d, 8)

    def forward(self, x):
        x, balance = self.inp(x), 0.0
        for layer in self.layers:
            x, aux = checkpoint(layer, x, use_reentrant=True)
            balance = balance + aux.balance
        return self.out(x), balance


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(40):
    y, balance = net(torch.randn(4, 32, 32))
    loss = y.square().mean() + 0.1 * balance
    opt.zero_grad()
    loss.backward()
    opt.step()
