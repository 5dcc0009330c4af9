import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Layer(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.gradient_checkpointing, self.heads = False, heads
        self.n1, self.n2, self.qkv, self.o = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def _forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))

    def forward(self, x):
        if self.gradient_checkpointing and self.training:
            return checkpoint(self._forward, x, use_reentrant=True)
        return self._forward(x)


class Encoder(nn.Module):
    def __init__(self, d=64, n=8):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(40, d), nn.Sequential(*[Layer(d) for _ in range(n)]), nn.Linear(d, 40)

    def gradient_checkpointing_enable(self):
        for layer in self.layers:
            layer.gradient_checkpointing = True

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint_sequential(self.layers, 2, x, use_reentrant=True)
        return self.head(x)


torch.manual_seed(0)
model = Encoder()
model.gradient_checkpointing_enable()
opt = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(40):
    ids = torch.randint(0, 40, (8, 48))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    opt.zero_grad()
