# mmengine's cfg activation_checkpointing=['backbone.layer2', ...] (forward patched with a reentrant checkpoint) on a ResNet whose blocks have with_cp=True (a reentrant checkpoint inside each block's forward): open-mmlab/mmengine!1319 and mmdet's with_cp
import functools, torch
from torch import nn
import torch.utils.checkpoint as cp

torch.manual_seed(0)


def wrap_forward(forward):
    @functools.wraps(forward)
    def inner(*args):
        return cp.checkpoint(forward, *args, use_reentrant=True)

    return inner


def turn_on(model, names):
    for name, m in model.named_modules():
        if name in names:
            m.forward = wrap_forward(m.forward)


class Bottleneck(nn.Module):
    def __init__(s, c, with_cp):
        super().__init__()
        s.with_cp = with_cp
        s.conv1 = nn.Conv2d(c, c, 1)
        s.norm1 = nn.GroupNorm(4, c)
        s.conv2 = nn.Conv2d(c, c, 3, padding=1)
        s.norm2 = nn.GroupNorm(4, c)

    def forward(s, x):
        def _inner(x):
            return x + s.norm2(s.conv2(torch.relu(s.norm1(s.conv1(x)))))

        out = (
            cp.checkpoint(_inner, x, use_reentrant=True)
            if s.with_cp and x.requires_grad
            else _inner(x)
        )
        return torch.relu(out)


class Det(nn.Module):
    def __init__(s, c=32):
        super().__init__()
        s.stem = nn.Conv2d(3, c, 3, padding=1)
        for i in (1, 2):
            setattr(s, f"layer{i}", nn.Sequential(*[Bottleneck(c, True) for _ in range(8)]))
        s.head = nn.Linear(c, 5)

    def forward(s, x):
        return s.head(s.layer2(s.layer1(s.stem(x))).mean((2, 3)))


net = Det()
turn_on(net, ["layer1", "layer2"])
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(40):
    x = torch.randn(8, 3, 24, 24)
    y = torch.randint(0, 5, (8,))
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
