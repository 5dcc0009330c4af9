import torch
from torch import nn
import torch.nn.functional as F


class Attn(nn.Module):
    def __init__(self, d, h=4):
        super().__init__()
        self.h, self.norm, self.qkv, self.o = h, nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


class RevBackProp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks):
        a, b = torch.chunk(x, 2, dim=-1)
        for block in blocks:
            with torch.no_grad():
                a = a + block.F(b)
                b = b + block.G(a)
        ctx.save_for_backward(a.detach(), b.detach())
        ctx.blocks = blocks
        return torch.cat([a, b], dim=-1)

    @staticmethod
    def backward(ctx, dx):
        da, db = torch.chunk(dx, 2, dim=-1)
        a, b = ctx.saved_tensors
        for block in ctx.blocks[::-1]:
            a, b, da, db = block.backward_pass(a, b, da.clone(), db.clone())
        return torch.cat([da, db], dim=-1), None


class RevViTBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.F, self.G = Attn(d), nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def backward_pass(self, y1, y2, dy1, dy2):
        with torch.enable_grad():
            y1.requires_grad = True
            gy = self.G(y1)
            gy.backward(dy2)
        with torch.no_grad():
            x2 = y2 - gy
            dy1 = dy1 + y1.grad
            y1.grad = None
        with torch.enable_grad():
            x2.requires_grad = True
            fx = self.F(x2)
            fx.backward(dy1)
        with torch.no_grad():
            x1 = y1 - fx
            dy2 = dy2 + x2.grad
            x2.grad = None
            x2 = x2.detach()
        return x1.detach(), x2, dy1, dy2


class RevViT(nn.Module):
    def __init__(self, d=64, n=4):
        super().__init__()
        self.patch, self.blocks, self.head = nn.Linear(48, d), nn.ModuleList(RevViTBlock(d) for _ in range(n)), nn.Linear(2 * d, 10)

    def forward(self, x):
        x = self.patch(x)
        x = torch.cat([x, x], -1)
        return self.head(RevBackProp.apply(x, list(self.blocks)).mean(1))


torch.manual_seed(0)
net = RevViT()
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(40):
    F.cross_entropy(net(torch.randn(8, 36, 48)), torch.randint(0, 10, (8,))).backward()
    opt.step(); opt.zero_grad()
