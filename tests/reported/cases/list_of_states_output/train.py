import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Stage(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(4, c), nn.ReLU())
        self.side = nn.ModuleList(nn.Conv2d(c, 4, 1) for _ in range(2))

    def forward(self, x):
        h = self.main(x)
        return h, [s(h) for s in self.side]


torch.manual_seed(0)
stem, stages = nn.Conv2d(3, 24, 3, padding=1), nn.ModuleList(Stage(24) for _ in range(2))
opt = torch.optim.SGD([*stem.parameters(), *stages.parameters()], 0.01)
for step in range(40):
    x, sides = stem(torch.randn(4, 3, 20, 20)), []
    for stage in stages:
        x, s = checkpoint(stage, x, use_reentrant=True, preserve_rng_state=False)
        sides += s
    loss = x.square().mean() + sum(s.square().mean() for s in sides)
    loss.backward()
    opt.step()
    opt.zero_grad()
