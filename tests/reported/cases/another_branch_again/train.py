# huggingface/peft#2826: per-call hooks give each adapter layer its offsets during the forward and are removed before backward
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class ALinear(nn.Module):
    def __init__(s, d, r=4):
        super().__init__()
        s.base = nn.Linear(d, d)
        s.A = nn.Linear(d, r, bias=False)
        s.B = nn.Linear(r, d, bias=False)
        nn.init.normal_(s.B.weight, std=0.02)
        for p in s.base.parameters():
            p.requires_grad_(False)

    def forward(s, x, offsets=None):
        out = s.base(x)
        if offsets is None:
            return out  # no offsets: adapter inactive
        m = (torch.arange(x.shape[1])[None] >= (x.shape[1] - offsets)[:, None]).to(x.dtype)[
            ..., None
        ]
        return out + m * s.B(s.A(x))


class Block(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.n = nn.LayerNorm(d)
        s.up = ALinear(d)
        s.down = ALinear(d)

    def forward(s, x):
        return x + s.down(torch.nn.functional.gelu(s.up(s.n(x))))


class LM(nn.Module):
    def __init__(s, d=128, n=4, v=256):
        super().__init__()
        s.emb = nn.Embedding(v, d)
        s.blocks = nn.ModuleList(Block(d) for _ in range(n))
        s.head = nn.Linear(d, v)

    def forward(s, ids):
        x = s.emb(ids).requires_grad_(True)
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return s.head(x)


class Peft(nn.Module):
    def __init__(s, m):
        super().__init__()
        s.m = m

    def forward(s, ids, offsets):
        def hook(mod, a, k):
            k["offsets"] = offsets
            return a, k

        hs = [
            m.register_forward_pre_hook(hook, with_kwargs=True)
            for m in s.m.modules()
            if isinstance(m, ALinear)
        ]
        try:
            return s.m(ids)
        finally:
            for h in hs:
                h.remove()


lm = LM()
for p in list(lm.emb.parameters()) + list(lm.head.parameters()):
    p.requires_grad_(False)
net = Peft(lm)
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-3)
for step in range(40):
    ids = torch.randint(0, 256, (4, 64))
    off = torch.randint(8, 32, (4,))
    loss = nn.functional.cross_entropy(net(ids, off).flatten(0, 1), ids.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
