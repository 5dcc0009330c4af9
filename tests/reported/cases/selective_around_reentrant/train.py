import functools
import torch, torch.nn as nn, torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.h = h

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))

OPS = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


class Model(nn.Module):
    def __init__(self, d=96, n=4, vocab=256):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(vocab, d), nn.ModuleList(Block(d, 4) for _ in range(n)), nn.Linear(d, vocab)

    def forward(self, t):
        x = self.emb(t)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(OPS))
        return self.head(x)


torch.manual_seed(0)
model = Model()
apply_activation_checkpointing(
    model, checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    check_fn=lambda m: isinstance(m, Block))
opt = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(60):
    t = torch.randint(0, 256, (4, 65))
    loss = F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
    
