import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.silu(self.a(self.norm(x))))


torch.manual_seed(0)
inp, trunk, heads = nn.Linear(20, 80), nn.ModuleList(Block(80) for _ in range(5)), nn.ModuleList(nn.Linear(80, 1) for _ in range(3))
scale = nn.Parameter(torch.ones(3))
opt = torch.optim.Adam([*inp.parameters(), *trunk.parameters(), *heads.parameters()], 1e-3)
opt_scale = torch.optim.SGD([scale], 0.01)
shared = [*trunk[3].parameters(), *trunk[4].parameters()]
for step in range(40):
    x, y = torch.randn(64, 20), torch.randn(64, 3)
    h = inp(x)
    for block in trunk:
        h = checkpoint(block, h, use_reentrant=False)
    losses = torch.stack([F.mse_loss(head(h)[:, 0], y[:, i]) for i, head in enumerate(heads)])
    norms = []
    for loss in losses:
        got = torch.autograd.grad(loss, shared, retain_graph=True)
        norms.append(torch.sqrt(sum(g.square().sum() for g in got)))
    norms = torch.stack(norms).detach()
    (losses * scale.detach()).sum().backward()
    opt.step()
    opt.zero_grad()
    ((scale * norms) - (scale * norms).mean().detach()).abs().sum().backward()
    opt_scale.step()
    opt_scale.zero_grad()
