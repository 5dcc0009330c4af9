"""Gradient caching as sentence-transformers' CachedMultipleNegativesRankingLoss has it (GradCache): the
encoder runs without gradients over mini-batches, the loss is computed on the detached embeddings, and a
hook on the loss runs the encoder again, with gradients, in the backward pass. CKPT=1: with each layer
checkpointed as well (gradient_checkpointing=True)."""

import os
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.inp = nn.Linear(16, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(4))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if os.environ.get("CKPT") else layer(x)
        return x.mean(1)


torch.manual_seed(0)
model = Encoder()
opt = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(30):
    batch = torch.randn(32, 24, 16)
    parts = batch.split(8)
    with torch.no_grad():
        cached = [model(part) for part in parts]
    cached = [c.detach().requires_grad_() for c in cached]
    whole = torch.cat(cached)
    loss = nn.functional.cross_entropy(whole @ whole.T, torch.arange(32))
    loss.backward()
    grads = [c.grad for c in cached]
    value = loss.detach().requires_grad_()

    def again(grad, parts=parts, grads=grads):
        with torch.enable_grad():
            for part, g in zip(parts, grads):
                (torch.dot(model(part).flatten(), g.flatten()) * grad).backward()

    value.register_hook(again)
    value.backward()
    opt.step()
    opt.zero_grad()
    print(step, f"{loss.item():.9f}")
