import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Evo(nn.Module):
    def __init__(self, c, use_ckpt=False):
        super().__init__()
        self.ckpt, self.a, self.b, self.n = use_ckpt, nn.Linear(c, 4 * c), nn.Linear(4 * c, c), nn.LayerNorm(c)

    def inner(self, m, z):
        z = z + torch.tanh(self.n(m))
        return m + self.b(F.relu(self.a(z))), z

    def forward(self, m, z):
        if self.ckpt:
            return checkpoint(self.inner, m, z, use_reentrant=True)
        return self.inner(m, z)


def pair(i, m, z):
    for b in blocks[i:i + 2]:
        m, z = b(m, z)
    return m, z


torch.manual_seed(0)
inp, blocks = nn.Linear(12, 64), nn.ModuleList(Evo(64, use_ckpt=True) for _ in range(6))
opt = torch.optim.Adam([*inp.parameters(), *blocks.parameters()], 1e-3)
for step in range(40):
    m = inp(torch.randn(512, 12))
    z = m * 0.5
    for i in range(0, 6, 2):
        m, z = checkpoint(pair, i, m, z, use_reentrant=True)
    (m.square().mean() + z.square().mean()).backward()
    opt.step(); opt.zero_grad()
