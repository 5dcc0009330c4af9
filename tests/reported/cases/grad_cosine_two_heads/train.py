import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
trunk = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(5))
ha, hb = nn.Linear(64, 5), nn.Linear(64, 1)
opt = torch.optim.AdamW([*trunk.parameters(), *ha.parameters(), *hb.parameters()], 1e-3)
w = trunk[4][2].weight
for step in range(40):
    h = torch.randn(64, 64)
    for b in trunk:
        h = checkpoint(b, h, use_reentrant=False)
    la, lb = F.cross_entropy(ha(h), torch.randint(0, 5, (64,))), hb(h).square().mean()
    ga, gb = (torch.autograd.grad(l, w, retain_graph=True)[0].flatten() for l in (la, lb))
    cos = F.cosine_similarity(ga, gb, dim=0)
    (la + lb * (1 if cos > 0 else 0.5)).backward()
    opt.step()
    opt.zero_grad()
