import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from collections import deque


class Stats:
    def __init__(self):
        self.window, self.total = deque(maxlen=1000), 0


class Conv(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1, self.c2, self.stats = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1), Stats()

    def forward(self, x):
        self.stats.window.append(float(x.detach().norm()))
        self.stats.total += x.shape[0]
        return x + self.c2(F.relu(self.c1(x)))


torch.manual_seed(0)
stem, convs = nn.Conv2d(3, 16, 1), nn.ModuleList(Conv(16) for _ in range(3))
opt = torch.optim.SGD([*stem.parameters(), *convs.parameters()], 0.01)
for step in range(40):
    x = stem(torch.randn(4, 3, 20, 20))
    for c in convs:
        x = checkpoint(c, x, use_reentrant=False)
    x.square().mean().backward(); opt.step(); opt.zero_grad()
