import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper


class ConvBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(4, c), nn.Conv2d(c, c, 1)

    def forward(self, x):
        return x + self.b(F.silu(self.n(self.a(x))))


class Groups(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, c, 3, padding=1), nn.ModuleList(ConvBlock(c) for _ in range(10)), nn.Linear(c, 5)

    def run(self, x, lo, hi):
        for block in self.blocks[lo:hi]:
            x = block(x)
        return x

    def forward(self, x):
        x = self.stem(x)
        for lo in range(0, 10, 5):
            x = checkpoint(self.run, x, lo, lo + 5, use_reentrant=True)
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
net = Groups()
apply_activation_checkpointing(net, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: isinstance(m, ConvBlock))
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(40):
    y = torch.randint(0, 5, (8,))
    loss = F.cross_entropy(net(torch.randn(8, 3, 24, 24)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
