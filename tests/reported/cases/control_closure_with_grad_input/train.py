import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
embed = nn.Embedding(40, 80)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(80, 160), nn.ReLU(), nn.Linear(160, 80)) for _ in range(4))
head = nn.Linear(80, 40)
opt = torch.optim.AdamW([*embed.parameters(), *blocks.parameters(), *head.parameters()], 1e-3)
for step in range(40):
    ids = torch.randint(0, 40, (4, 24))
    h = embed(ids)
    for i in range(0, 4, 2):
        h = checkpoint(lambda z, part=blocks[i:i + 2]: part[1](part[0](z)), h, use_reentrant=True)
    F.cross_entropy(head(h).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    opt.zero_grad()
