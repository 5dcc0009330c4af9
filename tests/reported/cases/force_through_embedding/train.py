import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.a = nn.Linear(d + 1, d)
        s.b = nn.Linear(d, d)

    def forward(s, h, r):
        return h + s.b(
            torch.nn.functional.silu(
                s.a(
                    torch.cat([h[:, None].expand(-1, 4, -1), r[:, None, None].expand(-1, 4, 1)], -1)
                )
            ).sum(1)
        )


layers = nn.ModuleList(Layer(48) for _ in range(1))
emb = nn.Embedding(5, 48)
out = nn.Linear(48, 1)
opt = torch.optim.Adam([*layers.parameters(), *emb.parameters(), *out.parameters()], 1e-3)
for step in range(40):
    pos = torch.randn(24, 3, requires_grad=True)
    h = emb(torch.randint(0, 5, (24,)))
    r = pos.square().sum(-1)
    for l in layers:
        h = checkpoint(l, h, r, use_reentrant=False)
    e = out(h).sum()
    f = torch.autograd.grad(e, pos, create_graph=True)[0]
    loss = e.square() + f.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
