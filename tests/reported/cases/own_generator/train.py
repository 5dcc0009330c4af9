import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Noisy(nn.Module):
    def __init__(self, d, seed):
        super().__init__()
        self.a, self.b, self.gen = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), torch.Generator().manual_seed(seed)

    def forward(self, x):
        h = F.gelu(self.a(x))
        mask = (torch.rand(h.shape, generator=self.gen) > 0.2).float() / 0.8
        return x + self.b(h * mask)


torch.manual_seed(0)
inp, layers = nn.Linear(16, 80), nn.ModuleList(Noisy(80, i) for i in range(3))
opt = torch.optim.Adam([*inp.parameters(), *layers.parameters()], 1e-3)
for step in range(40):
    x = inp(torch.randn(48, 16))
    for l in layers:
        x = checkpoint(l, x, use_reentrant=False)
    x.square().mean().backward(); opt.step(); opt.zero_grad()
