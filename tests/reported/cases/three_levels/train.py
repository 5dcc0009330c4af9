# graph_weather!193: model, block and MLP each checkpointed, all non-reentrant, without random state
from common import *
from torch.utils.checkpoint import checkpoint


class CkMLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d), nn.LayerNorm(d)
        )

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False, preserve_rng_state=False)


class GBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.edge = CkMLP(d)
        self.node = CkMLP(d)

    def forward(self, x, e):
        e = e + self.edge(e + x)
        return x + self.node(x + e), e


class Processor(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.blocks = nn.ModuleList([GBlock(d) for _ in range(n)])

    def forward(self, x, e):
        for b in self.blocks:
            x, e = checkpoint(b, x, e, use_reentrant=False, preserve_rng_state=False)
        return x, e


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(256, 256)
        self.processor = Processor(6, 256)
        self.dec = nn.Linear(256, 256)

    def custom(self, x):
        h = self.enc(x)
        h, e = self.processor(h, h * 0.5)
        return self.dec(h)

    def forward(self, x):
        return checkpoint(self.custom, x, use_reentrant=False, preserve_rng_state=False)


train(Model())
