import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Point(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(2 * c, c, 1)

    def apply1(self, conv, x):
        if torch.is_grad_enabled():
            return conv(x)
        return torch.einsum("oi,bihw->bohw", conv.weight[:, :, 0, 0], x) + conv.bias[:, None, None]

    def forward(self, x):
        return x + self.apply1(self.c2, F.relu(self.apply1(self.c1, x)))


torch.manual_seed(0)
stem, blocks = nn.Conv2d(3, 24, 3, padding=1), nn.ModuleList(Point(24) for _ in range(4))
opt = torch.optim.SGD([*stem.parameters(), *blocks.parameters()], 0.01)
for step in range(40):
    x = stem(torch.randn(4, 3, 20, 20))
    for b in blocks:
        x = checkpoint(b, x, use_reentrant=True)
    x.square().mean().backward()
    opt.step(); opt.zero_grad()
