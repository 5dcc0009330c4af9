"""Train a small transformer in plain PyTorch, with no checkpoint, one, or two.

``--checkpoint once`` is ordinary activation checkpointing: every block's forward runs once
more in the backward pass. ``--checkpoint twice`` puts a second checkpoint around a block that
already checkpoints itself, and the forward runs twice more: the mistake that is easy to make
when a library and a training script each switch checkpointing on.

    python examples/plain_pytorch.py --checkpoint twice
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 1024


class Block(nn.Module):
    """Causal self-attention and an MLP, before each a layer norm."""

    def __init__(self, width: int, heads: int, checkpointed: bool) -> None:
        super().__init__()
        self.heads = heads
        self.checkpointed = checkpointed
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            result: Tensor = checkpoint(self.compute, x, use_reentrant=True)
            return result
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.mlp(self.mlp_norm(x))
        return x + hidden


class Transformer(nn.Module):
    def __init__(self, checkpoints: str, layers: int = 4, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.checkpoint_blocks = checkpoints == "twice"
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, checkpointed=checkpoints != "none") for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint_blocks else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer.")
    parser.add_argument("--checkpoint", choices=["none", "once", "twice"], default="once")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Transformer(args.checkpoint).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shape = (args.batch_size, args.sequence_length + 1)
    tokens = torch.randint(0, VOCABULARY, shape, device=device)
    for step in range(args.steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
