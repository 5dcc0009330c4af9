import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.silu(self.a(self.norm(x))))


torch.manual_seed(0)
blocks = nn.ModuleList(Block(80) for _ in range(3))
opt = torch.optim.SGD(blocks.parameters(), 0.05)
for step in range(40):
    x = torch.randn(64, 80, requires_grad=True)
    h = x
    for b in blocks:
        h = checkpoint(b, h, use_reentrant=False)
    loss = h.square().mean()
    torch.autograd.backward(loss, inputs=[x], retain_graph=True)
    for i in reversed(range(3)):
        torch.autograd.backward(loss, inputs=list(blocks[i].parameters()), retain_graph=i > 0)
    opt.step()
    opt.zero_grad()
