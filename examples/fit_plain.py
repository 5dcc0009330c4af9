"""Train within a memory limit: the first steps measure, and the rest recomputes what it has to.

python examples/fit_plain.py --memory 50%
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import recompute_scan

WIDTH, WORDS = 128, 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", default="50%")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), body, nn.Linear(WIDTH, WORDS))
    model = recompute_scan.fit(model, args.memory)  # the one line
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(args.steps):
        tokens = torch.randint(0, WORDS, (4, 64))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
