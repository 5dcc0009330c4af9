import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, d, h=4):
        super().__init__()
        self.h, self.norm, self.qkv, self.o = h, nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        if torch.is_grad_enabled():
            y = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).reshape(b, t, d))


torch.manual_seed(0)
embed, layers, head = nn.Embedding(30, 64), nn.ModuleList(Attention(64) for _ in range(4)), nn.Linear(64, 30)
opt = torch.optim.AdamW([*embed.parameters(), *layers.parameters(), *head.parameters()], 1e-3)
for step in range(40):
    ids = torch.randint(0, 30, (4, 48))
    x = embed(ids)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    F.cross_entropy(head(x).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    opt.zero_grad()
