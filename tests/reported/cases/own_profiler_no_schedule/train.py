import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
inp, blocks = nn.Linear(16, 96), nn.ModuleList(nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(3))
opt = torch.optim.AdamW([*inp.parameters(), *blocks.parameters()], 1e-3)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
    for step in range(40):
        x = inp(torch.randn(64, 16))
        for b in blocks:
            x = checkpoint(b, x, use_reentrant=False)
        x.square().mean().backward()
        opt.step()
        opt.zero_grad()
print(len(prof.key_averages()))
