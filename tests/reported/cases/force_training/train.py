# machine-learned force fields (energy model checkpointed per layer, forces by autograd.grad(create_graph=True), then loss.backward())
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.msg = nn.Linear(2 * d + 1, d)
        s.upd = nn.Linear(d, d)

    def forward(s, h, r):
        n = h.shape[0]
        e = torch.cat([h[:, None].expand(n, n, -1), h[None].expand(n, n, -1), r[..., None]], -1)
        return h + s.upd(torch.nn.functional.silu(s.msg(e)).sum(1))


class Energy(nn.Module):
    def __init__(s, d=48, n=3):
        super().__init__()
        s.z = nn.Embedding(5, d)
        s.layers = nn.ModuleList(Layer(d) for _ in range(n))
        s.out = nn.Linear(d, 1)

    def forward(s, z, pos):
        r = ((pos[:, None] - pos[None]).square().sum(-1) + 1e-3).sqrt()
        h = s.z(z)
        for l in s.layers:
            h = checkpoint(l, h, r, use_reentrant=False)
        return s.out(h).sum()


net = Energy()
opt = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(40):
    pos = torch.randn(24, 3, requires_grad=True)
    z = torch.randint(0, 5, (24,))
    e = net(z, pos)
    f = -torch.autograd.grad(e, pos, create_graph=True)[0]
    loss = e.square() * 1e-4 + (f - torch.randn_like(f)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
