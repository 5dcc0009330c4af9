import torch
from torch import nn
from blocks import Narrow as Block
from torch.utils.checkpoint import checkpoint



class Critic(nn.Module):
    def __init__(self, d=80):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(40, d), nn.ModuleList(Block(d) for _ in range(3)), nn.Linear(d, 1)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return self.out(x)

torch.manual_seed(0)
critic = Critic()
opt = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.5, 0.9))
for step in range(40):
    real, fake = torch.randn(48, 40), torch.rand(48, 40)
    t = torch.rand(48, 1)
    mid = (t * real + (1 - t) * fake).requires_grad_()
    (g,) = torch.autograd.grad(critic(mid).sum(), mid, create_graph=True)
    loss = critic(fake).mean() - critic(real).mean() + 10 * (g.norm(dim=1) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
