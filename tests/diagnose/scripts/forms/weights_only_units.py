"""Weights only, of a model of several FSDP units, saved by Lightning's strategy in shards.

Needs lightning up to 2.2.1, the last with the fault.
"""

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BROKEN = True

torch.manual_seed(0)
dist.init_process_group("gloo")
strategy = FSDPStrategy(state_dict_type="sharded")
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    device_id=torch.device("cpu"),
    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    use_orig_params=True,
)
strategy.model = strategy._model = model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
checkpoint = {"state_dict": model.state_dict(), "epoch": 1, "global_step": 4}
strategy.save_checkpoint(checkpoint if BROKEN else checkpoint | {"optimizer_states": []}, "last")
