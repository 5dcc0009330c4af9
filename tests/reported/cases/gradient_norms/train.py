# multi-task training with GradNorm: per-task gradient norms at the last shared block (autograd.grad, create_graph), then one backward of the weighted sum; trunk checkpointed
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
w = nn.Parameter(torch.ones(3))
opt = torch.optim.AdamW([*net.parameters(), w], 1e-3)
last = net.blocks[-1].down.weight
for step in range(40):
    outs = net(torch.randn(8, 64, 16))
    losses = torch.stack([(o - i).square().mean() for i, o in enumerate(outs)])
    norms = torch.stack(
        [
            torch.autograd.grad(w[i] * losses[i], last, retain_graph=True, create_graph=True)[
                0
            ].norm()
            for i in range(3)
        ]
    )
    gn = (norms - norms.mean().detach()).abs().sum()
    opt.zero_grad()
    ((w.detach() * losses).sum() + gn).backward()
    opt.step()
    if step % 10 == 0:
        print(step, losses.sum().item())
