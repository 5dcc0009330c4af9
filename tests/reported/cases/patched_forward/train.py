# open-mmlab/mmengine#1425: forward of named modules replaced by a checkpointed one (default variant), whole backbone wrapped, images need no gradient
import functools, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


def wrap_forward(forward):
    @functools.wraps(forward)
    def inner(*args):
        return checkpoint(forward, *args, use_reentrant=True)

    return inner


def turn_on(model, names):
    for name, m in model.named_modules():
        if name in names:
            m.forward = wrap_forward(m.forward)


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU())


class Det(nn.Module):
    def __init__(s):
        super().__init__()
        s.backbone = nn.Sequential(block(3, 32), block(32, 32), block(32, 32))
        s.neck = nn.Conv2d(32, 32, 1)
        s.head = nn.Linear(32, 5)

    def forward(s, x):
        return s.head(s.neck(s.backbone(x)).mean((2, 3)))


net = Det()
turn_on(net, ["backbone"])
opt = torch.optim.AdamW(net.parameters(), 1e-3)
lf = nn.CrossEntropyLoss()
for step in range(40):
    x = torch.randn(8, 3, 32, 32)
    y = torch.randint(0, 5, (8,))
    loss = lf(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), net.backbone[0][0].weight.grad is None)
