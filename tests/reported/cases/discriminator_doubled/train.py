import torch, torch.nn.functional as F
from model import *

g = make(False)
d = make(True)
og = torch.optim.AdamW(g.parameters(), 1e-3)
od = torch.optim.SGD(d.parameters(), 1e-3)
head = torch.nn.Linear(1, 16)
for i in range(26):
    z = torch.randn(8, 32, 16)
    for _ in range(2):
        od.zero_grad()
        l = (
            F.softplus(-d(torch.randn(8, 32, 16))).mean()
            + F.softplus(d(head(g(z)).detach())).mean()
        )
        l.backward()
        od.step()
    og.zero_grad()
    l2 = F.softplus(-d(head(g(z)))).mean()
    l2.backward()
    og.step()
    print(f"step {i} d {l.item():.8f} g {l2.item():.8f}")
