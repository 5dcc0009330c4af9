import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Field:
    def __init__(self, d):
        self.w = {"up": nn.Parameter(torch.randn(d, 3 * d) / 10), "down": nn.Parameter(torch.randn(3 * d, d) / 17)}

    def render(self, x):
        return torch.relu(x @ self.w["up"]) @ self.w["down"]


torch.manual_seed(0)
field, tail, head = Field(96), nn.Sequential(nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 96)), nn.Linear(96, 1)
def refine(h, net=tail):
    return h + net(h)
opt = torch.optim.Adam([*field.w.values(), *tail.parameters(), *head.parameters()], 1e-3)
for step in range(40):
    h = checkpoint(field.render, torch.rand(64, 96), use_reentrant=True)
    h = checkpoint(refine, h, use_reentrant=True)
    loss = head(h).square().mean()
    loss.backward()
    opt.step(); opt.zero_grad()
