"""An optimizer for each client of each round, and one for all rounds."""

import torch
from tiny import STEPS, Net, say

torch.manual_seed(0)
model = Net()
outer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(STEPS):
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        say(loss.item())
    model(torch.randn(4, 8)).square().mean().backward()
    outer.step()
    outer.zero_grad()
