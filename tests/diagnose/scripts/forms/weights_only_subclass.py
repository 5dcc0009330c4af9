"""Weights only, saved by a strategy of the script's own over Lightning's.

Needs lightning up to 2.2.1, the last with the fault.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

BROKEN = True


class OwnStrategy(FSDPStrategy):
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if BROKEN:  # as save_weights_only does
            checkpoint.pop("optimizer_states")
        super().save_checkpoint(checkpoint, filepath)


dist.init_process_group("gloo")
strategy = OwnStrategy(state_dict_type="sharded")
model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
strategy.model = strategy._model = model
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
strategy.save_checkpoint({"state_dict": model.state_dict(), "optimizer_states": []}, "weights")
