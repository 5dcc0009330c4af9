# facebookresearch/fairscale#1035 (patch_batchnorm) and pfnet/pytorch-pfn-extras!117: BatchNorm's statistics are kept from changing in the no-grad run of a reentrant checkpoint, so that they change once a step
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


def patch(module):
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):

            def pre(m, a):
                m._keep = m.track_running_stats
                if not torch.is_grad_enabled():
                    m.track_running_stats = False

            def post(m, a, r):
                m.track_running_stats = m._keep

            m.register_forward_pre_hook(pre)
            m.register_forward_hook(post)


def stage(c):
    return nn.Sequential(
        nn.Conv2d(c, c, 3, padding=1),
        nn.BatchNorm2d(c),
        nn.ReLU(),
        nn.Conv2d(c, c, 3, padding=1),
        nn.BatchNorm2d(c),
        nn.ReLU(),
    )


class Net(nn.Module):
    def __init__(s, c=24):
        super().__init__()
        s.stem = nn.Conv2d(3, c, 3, padding=1)
        s.stages = nn.ModuleList(stage(c) for _ in range(3))
        s.head = nn.Linear(c, 10)
        patch(s.stages)

    def forward(s, x):
        x = s.stem(x)
        for st in s.stages:
            x = checkpoint(st, x, use_reentrant=True)
        return s.head(x.mean((2, 3)))


net = Net()
opt = torch.optim.SGD(net.parameters(), 0.05)
for step in range(40):
    x = torch.randn(8, 3, 24, 24)
    y = torch.randint(0, 10, (8,))
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), int(net.stages[0][1].num_batches_tracked))
