"""Layers that are checkpointed and compiled with their checkpoint, as torchtitan's are.

With ``--twice`` a second checkpoint is around each compiled layer: it runs again as a whole, and
its compiled backward pass runs it once more.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

STEPS = 30


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.compute, x, use_reentrant=False)
        return result

    def compute(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.down(functional.gelu(self.up(self.norm(x)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--backend", default="aot_eager")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    calls = [torch.compile(layer, backend=options.backend) for layer in layers]
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(4, 16, 32)
        for call in calls:
            x = checkpoint(call, x, use_reentrant=False) if options.twice else call(x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", float(loss.item()).hex(), flush=True)


if __name__ == "__main__":
    main()
