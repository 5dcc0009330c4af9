# pytorch/pytorch#81296: a weight used in two checkpointed layers; a hook on the gradient accumulator runs once per reentrant region instead of once (optimizer-in-backward)
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(s, d, shared):
        super().__init__()
        s.own = nn.Linear(d, d)
        s.shared = shared

    def forward(s, x):
        return x + s.shared(nn.functional.gelu(s.own(x)))


d = 128
shared = nn.Linear(d, d)


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.inp = nn.Linear(d, d)
        s.blocks = nn.ModuleList(Block(d, shared) for _ in range(4))
        s.head = nn.Linear(d, 10)

    def forward(s, x):
        x = s.inp(x)
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=True)
        return s.head(x)


net = Net()
calls = [0]
opts = {p: torch.optim.SGD([p], 0.05) for p in net.parameters()}


def step_now(p):  # the tutorial of torch: one optimizer per parameter, stepped in the hook
    calls[0] += p is shared.weight
    opts[p].step()
    opts[p].zero_grad()


for p in net.parameters():
    p.register_post_accumulate_grad_hook(step_now)
for step in range(40):
    x = torch.randn(32, d)
    y = torch.randint(0, 10, (32,))
    loss = nn.functional.cross_entropy(net(x), y)
    calls[0] = 0
    loss.backward()
    if step % 10 == 0:
        print(step, loss.item(), "shared weight stepped", calls[0], "times in one backward")
