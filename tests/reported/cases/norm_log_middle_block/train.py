import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    gradient_checkpointing = True

    def __init__(self, d):
        super().__init__()
        self.n, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def inner(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.n(x))))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.gradient_checkpointing and self.training else self.inner(x)


torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(30, 64), *[Layer(64) for _ in range(6)], nn.Linear(64, 30))
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(40):
    ids = torch.randint(0, 30, (4, 24))
    loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    norm = torch.autograd.grad(loss, net[3].fc1.weight, retain_graph=True)[0].norm().item()
    loss.backward()
    opt.step(); opt.zero_grad()
