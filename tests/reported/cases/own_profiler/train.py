"""A script with torch.profiler of its own in the form that its tutorials have: a schedule that repeats
until training ends. It says which steps it records; in the others (wait) no profiler of its own runs."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.a, self.b = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def _inner(self, x):
        return x + self.b(torch.relu(self.a(x)))

    def forward(self, x):
        return checkpoint(self._inner, x, use_reentrant=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), 1e-3)
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=3),
    on_trace_ready=lambda p: print("traced", len(p.events()) > 100),
) as own:
    for step in range(80):
        loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(step, f"{loss.item():.9f}")
        own.step()
