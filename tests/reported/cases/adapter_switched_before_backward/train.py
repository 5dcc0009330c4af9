# huggingface/peft#2832: set_adapter(a) forward, set_adapter(b) forward, one backward of both losses; the recompute sees the last adapter
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class MLinear(nn.Module):
    def __init__(s, d, r=4):
        super().__init__()
        s.base = nn.Linear(d, d).requires_grad_(False)
        s.active = "rgb"
        s.A = nn.ModuleDict({k: nn.Linear(d, r, bias=False) for k in ("rgb", "depth")})
        s.B = nn.ModuleDict({k: nn.Linear(r, d, bias=False) for k in ("rgb", "depth")})
        for b in s.B.values():
            nn.init.normal_(b.weight, std=0.02)

    def forward(s, x):
        return s.base(x) + s.B[s.active](s.A[s.active](x))


class Block(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.n = nn.LayerNorm(d)
        s.up = MLinear(d)
        s.down = MLinear(d)

    def forward(s, x):
        return x + s.down(nn.functional.gelu(s.up(s.n(x))))


class Vit(nn.Module):
    def __init__(s, d=96, n=4):
        super().__init__()
        s.patch = nn.Linear(48, d)
        s.blocks = nn.ModuleList(Block(d) for _ in range(n))
        s.head = nn.Linear(d, 10)

    def set_adapter(s, k):
        for m in s.modules():
            if isinstance(m, MLinear):
                m.active = k

    def forward(s, x):
        x = s.patch(x)
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return s.head(x.mean(1))


net = Vit()
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-3)
for step in range(40):
    y = torch.randint(0, 10, (8,))
    loss = 0
    for k in ("rgb", "depth"):
        net.set_adapter(k)
        loss = loss + nn.functional.cross_entropy(net(torch.randn(8, 49, 48)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), net.blocks[0].up.B["rgb"].weight.grad is None)
