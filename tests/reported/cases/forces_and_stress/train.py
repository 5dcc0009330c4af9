import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Message(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.edge, self.node = nn.Linear(d + 1, d), nn.Linear(d, d)

    def forward(self, h, r):
        m = torch.tanh(self.edge(torch.cat([h[None].expand(len(h), -1, -1), r[..., None]], -1))).mean(1)
        return h + self.node(F.silu(m))


torch.manual_seed(0)
kind, layers, out = nn.Embedding(4, 48), nn.ModuleList(Message(48) for _ in range(3)), nn.Linear(48, 1)
opt = torch.optim.AdamW([*kind.parameters(), *layers.parameters(), *out.parameters()], 1e-3)
for step in range(40):
    pos, strain = torch.randn(20, 3, requires_grad=True), torch.zeros(3, 3, requires_grad=True)
    q = pos + pos @ strain
    r = ((q[:, None] - q[None]).square().sum(-1) + 1e-2).sqrt()
    h = kind(torch.randint(0, 4, (20,)))
    for l in layers:
        h = checkpoint(l, h, r, use_reentrant=False)
    e = out(h).sum()
    force = torch.autograd.grad(e, pos, create_graph=True)[0]
    stress = torch.autograd.grad(e, strain, create_graph=True)[0]
    loss = e.square() * 1e-3 + force.square().mean() + stress.square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
