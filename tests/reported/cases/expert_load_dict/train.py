import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Moe(nn.Module):
    def __init__(self, d, n=3):
        super().__init__()
        self.router, self.experts = nn.Linear(d, n), nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        self.load = {i: 0 for i in range(n)}

    def forward(self, x):
        p = self.router(x).softmax(-1)
        top = p.argmax(-1)
        y = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            mask = (top == i).unsqueeze(-1)
            self.load[i] += int(mask.sum())
            y = y + mask * p[..., i:i + 1] * torch.tanh(e(x))
        return x + y


class Model(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.embed, self.moes, self.head = nn.Embedding(30, d), nn.ModuleList(Moe(d) for _ in range(3)), nn.Linear(d, 30)

    def forward(self, ids):
        x = self.embed(ids)
        for m in self.moes:
            x = checkpoint(m, x, use_reentrant=True)
        return self.head(x)


torch.manual_seed(0)
model = Model()
opt = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(40):
    ids = torch.randint(0, 30, (4, 32))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    opt.zero_grad()
