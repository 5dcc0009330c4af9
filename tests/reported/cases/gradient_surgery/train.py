# guided-diffusion!144 / PCGrad kind: one forward of a checkpointed trunk, one autograd.grad per task with retain_graph, then the combined gradient is set
import torch
from torch import nn
from blocks import Block
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(s, d=96, n=3):
        super().__init__()
        s.inp = nn.Linear(16, d)
        s.blocks = nn.ModuleList(Block(d) for _ in range(n))
        s.heads = nn.ModuleList(nn.Linear(d, 4) for _ in range(3))

    def forward(s, x):
        x = s.inp(x)
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return [h(x) for h in s.heads]


net = Net()
shared = [*net.inp.parameters(), *net.blocks.parameters()]
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(40):
    outs = net(torch.randn(8, 64, 16))
    losses = [o.square().mean() for o in outs]
    opt.zero_grad()
    gs = [torch.autograd.grad(l, shared, retain_graph=i < 2) for i, l in enumerate(losses)]
    for p, *g in zip(shared, *gs):
        for i in range(3):
            for j in range(3):
                if i != j and (g[i] * g[j]).sum() < 0:
                    g[i] = g[i] - (g[i] * g[j]).sum() / g[j].square().sum() * g[j]
        p.grad = sum(g)
    opt.step()
    if step % 10 == 0:
        print(step, sum(l.item() for l in losses))
