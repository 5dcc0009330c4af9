import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Decoder(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.inp = nn.Conv2d(8, c, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1)) for _ in range(3))

    def last_weight(self):
        return self.blocks[-1][2].weight

    def forward(self, z):
        x = self.inp(z)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return x


torch.manual_seed(0)
decoder, critic = Decoder(), nn.Conv2d(24, 1, 3)
opt = torch.optim.Adam(decoder.parameters(), 1e-4, betas=(0.5, 0.9))
for step in range(40):
    z, target = torch.randn(4, 8, 16, 16), torch.randn(4, 24, 16, 16)
    x = decoder(z)
    nll, gan = (x - target).abs().mean(), -critic(x).mean()
    a = torch.autograd.grad(nll, decoder.last_weight(), retain_graph=True)[0]
    b = torch.autograd.grad(gan, decoder.last_weight(), retain_graph=True)[0]
    weight = (a.norm() / (b.norm() + 1e-4)).clamp(0, 1e4).detach()
    opt.zero_grad()
    (nll + weight * gan).backward()
    opt.step()
