import torch, torch.nn as nn
from torch.utils.checkpoint import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)


class Block(nn.Module):
    def __init__(s, d=96):
        super().__init__()
        s.n = nn.LayerNorm(d)
        s.a = nn.Linear(d, 4 * d)
        s.b = nn.Linear(4 * d, d)

    def inner(s, x):
        return x + s.b(torch.nn.functional.gelu(s.a(s.n(x))))

    def forward(s, x):
        return checkpoint(s.inner, x, use_reentrant=True)


class Net(nn.Module):
    def __init__(s, n=4, d=96):
        super().__init__()
        s.inp = nn.Linear(16, d)
        s.layers = nn.ModuleList(Block(d) for _ in range(n))
        s.out = nn.Linear(d, 1)

    def forward(s, x):
        x = s.inp(x)
        for l in s.layers:
            x = l(x)
        return s.out(x)


def make(double=True):
    torch.manual_seed(0)
    m = Net()
    if double:
        apply_activation_checkpointing(m, check_fn=lambda k: isinstance(k, Block))
    return m


class DS(torch.utils.data.Dataset):
    def __len__(s):
        return 4000

    def __getitem__(s, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(32, 16, generator=g), torch.ones(32, 1)
