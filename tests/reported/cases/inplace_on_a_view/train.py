# pytorch/pytorch#26546, #36383: InstanceNorm followed by an in-place ReLU at the end of a reentrant checkpoint
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Stage(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.conv = nn.Conv2d(c, c, 3, padding=1)
        s.norm = nn.InstanceNorm2d(c)
        s.act = nn.ReLU(inplace=True)

    def forward(s, x):
        return s.act(s.norm(s.conv(x)))


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.stem = nn.Conv2d(3, 32, 3, padding=1)
        s.stages = nn.ModuleList(Stage(32) for _ in range(4))
        s.head = nn.Linear(32, 10)

    def forward(s, x):
        x = s.stem(x)
        for st in s.stages:
            x = checkpoint(st, x, use_reentrant=True)
        return s.head(x.mean((2, 3)))


net = Net()
opt = torch.optim.SGD(net.parameters(), 0.05)
lf = nn.CrossEntropyLoss()
for step in range(40):
    x = torch.randn(8, 3, 32, 32)
    y = torch.randint(0, 10, (8,))
    loss = lf(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
