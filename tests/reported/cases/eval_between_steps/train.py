import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
inp, blocks = nn.Linear(16, 96), nn.ModuleList(nn.Sequential(nn.Linear(96, 192), nn.Tanh(), nn.Linear(192, 96)) for _ in range(4))
opt = torch.optim.Adam([*inp.parameters(), *blocks.parameters()], 1e-3)


def run(x):
    x = inp(x)
    for b in blocks:
        x = x + checkpoint(b, x, use_reentrant=False)
    return x


for step in range(40):
    run(torch.randn(64, 16)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if step % 2:
        blocks.eval()
        with torch.no_grad():
            print(step, sum(float(run(torch.randn(64, 16)).square().mean()) for _ in range(5)))
        blocks.train()
