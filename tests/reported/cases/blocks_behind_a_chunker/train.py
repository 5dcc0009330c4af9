# aqlaboratory/openfold#109: recycling iterations without grad go through checkpoint_blocks too; the last one has grad; blocks_per_ckpt=1
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Evo(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.a = nn.Linear(c, c)
        s.t = nn.Linear(c, c)
        s.o = nn.Linear(c, c)

    def forward(s, m, z):
        z = z + s.t(nn.functional.relu(s.a(m)))[:, None] * z
        return m + s.o(z.mean(1)), z


def wrap(a):
    return (a,) if not isinstance(a, tuple) else a


def execute(blocks, a):
    for b in blocks:
        a = wrap(b(*a))
    return a


def chunker(blocks, s, e):
    def f(*a):
        return execute(blocks[s:e], a)

    return f


def checkpoint_blocks(blocks, args, n):
    args = wrap(args)
    if n is None or not torch.is_grad_enabled() and False:
        return execute(blocks, args)
    for s in range(0, len(blocks), n):
        args = wrap(checkpoint(chunker(blocks, s, s + n), *args, use_reentrant=True))
    return args


class AF(nn.Module):
    def __init__(s, c=48, n=4):
        super().__init__()
        s.inp = nn.Linear(20, c)
        s.zin = nn.Linear(1, c)
        s.blocks = nn.ModuleList(Evo(c) for _ in range(n))
        s.out = nn.Linear(c, 3)

    def it(s, f, m0):
        m = s.inp(f) + m0
        z = s.zin(torch.ones(f.shape[0], 16, f.shape[1], 1))
        m, z = checkpoint_blocks(s.blocks, (m, z), 1)
        return m

    def forward(s, f):
        m = 0
        for k in range(4):
            last = k == 3
            with torch.set_grad_enabled(last):
                if last and torch.is_autocast_enabled():
                    torch.clear_autocast_cache()
                m = s.it(f, m)
        return s.out(m)


net = AF()
opt = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(40):
    f = torch.randn(2, 32, 20)
    loss = net(f).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
