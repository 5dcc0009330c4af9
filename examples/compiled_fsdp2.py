"""Train a small transformer as torchtitan does: checkpoints, torch.compile for each block, FSDP2.

Each block is wrapped in a checkpoint, compiled with it, and sharded. The compiler recomputes what
the checkpoint asks for inside its own backward graph: once. With ``--twice`` the model's forward
puts a second checkpoint around each compiled block, so that all of it runs again before the
compiled backward recomputes it a second time. Nothing fails; every step is only slower.

    torchrun --nproc-per-node 2 examples/compiled_fsdp2.py
    torchrun --nproc-per-node 2 examples/compiled_fsdp2.py --twice
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 512, 128, 4, 4, 64


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.silu(self.up(self.norm(x))))
        return result


class Transformer(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.twice else layer(x)
        logits: Tensor = self.head(x)
        return logits


def build_model(options: argparse.Namespace) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(options.twice)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for place, layer in enumerate(model.layers):
        block: Any = torch.compile(checkpoint_wrapper(layer), backend=options.backend)
        model.layers[place] = fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--twice", action="store_true", help="a second checkpoint, around blocks")
    parser.add_argument("--backend", default="inductor", help="what torch.compile compiles with")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build_model(options)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        tokens = torch.randint(VOCABULARY, (2, TOKENS))
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
