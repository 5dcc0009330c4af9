# ms-swift!9874, TRL!5757, Relax#19: the same forward of the same weights and inputs a second time, without gradients
from common import *
from torch.utils.checkpoint import checkpoint

bs = nn.ModuleList([Block(256) for _ in range(4)])


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.layers = bs
        s.head = nn.Linear(256, 512)

    def forward(s, x):
        for b in s.layers:
            x = checkpoint(b, x, use_reentrant=False) if torch.is_grad_enabled() else b(x)
        return s.head(x).log_softmax(-1)


def step(m, x):
    with torch.no_grad():
        old = m(x)
    new = m(x)
    return -((new - old).exp()).mean()


train(M(), step)
