import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Attn(nn.Module):
    def __init__(self, d, h=4):
        super().__init__()
        self.h, self.norm, self.qkv, self.o = h, nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn, self.mlp = Attn(d), nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + checkpoint(self.attn, x, use_reentrant=True)
        return x + checkpoint(self.mlp, x, use_reentrant=True)


torch.manual_seed(0)
inp, blocks = nn.Linear(16, 64), nn.ModuleList(Block(64) for _ in range(4))
opt = torch.optim.AdamW([*inp.parameters(), *blocks.parameters()], 1e-3)
for step in range(40):
    x = inp(torch.randn(8, 64, 16))
    for b in blocks:
        x = checkpoint(b, x, use_reentrant=True)
    x.square().mean().backward()
    opt.step()
    opt.zero_grad()
