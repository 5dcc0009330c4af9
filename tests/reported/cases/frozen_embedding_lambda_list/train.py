import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
embed = nn.Embedding(50, 72).requires_grad_(False)
low = [nn.TransformerEncoderLayer(72, 4, 144, 0.0, batch_first=True) for _ in range(2)]
high, head = nn.Sequential(nn.Linear(72, 144), nn.GELU(), nn.Linear(144, 72)), nn.Linear(72, 50)
opt = torch.optim.AdamW([p for m in (*low, high, head) for p in m.parameters()], 1e-3)
for step in range(40):
    ids = torch.randint(0, 50, (4, 24))
    x = checkpoint(lambda t: low[1](low[0](t)), embed(ids), use_reentrant=True)
    F.cross_entropy(head(x + high(x)).flatten(0, 1), ids.flatten()).backward()
    opt.step(); opt.zero_grad()
