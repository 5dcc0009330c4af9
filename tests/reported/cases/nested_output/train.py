# huggingface/transformers#6564, salesforce/BLIP#81 on today's torch: a block returns (hidden, (key, value)); a reentrant checkpoint passes the inner tuple through without gradients; a loss on it trains nothing
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.n = nn.LayerNorm(d)
        s.k = nn.Linear(d, d)
        s.v = nn.Linear(d, d)
        s.o = nn.Linear(d, d)

    def forward(s, x):
        h = s.n(x)
        k, v = s.k(h), s.v(h)
        return x + s.o(torch.relu(v)), (k, v)


class Net(nn.Module):
    def __init__(s, d=96, n=3):
        super().__init__()
        s.inp = nn.Linear(16, d)
        s.blocks = nn.ModuleList(Block(d) for _ in range(n))
        s.out = nn.Linear(d, 16)

    def forward(s, x):
        x = s.inp(x)
        keys = []
        for b in s.blocks:
            x, (k, v) = checkpoint(b, x, use_reentrant=True)
            keys.append(k)
        return s.out(x), keys


net = Net()
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(40):
    x = torch.randn(8, 64, 16)
    y, keys = net(x)
    loss = nn.functional.mse_loss(y, x) + 0.1 * sum(
        k.square().mean() for k in keys
    )  # an auxiliary loss on the keys
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(
            step,
            loss.item(),
            "key weights have a gradient:",
            net.blocks[0].k.weight.grad is not None,
        )
