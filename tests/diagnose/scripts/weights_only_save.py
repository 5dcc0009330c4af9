"""What Lightning's FSDP strategy does for ``ModelCheckpoint(save_weights_only=True)``.

Needs lightning up to 2.2.1, the last with the fault.
"""

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

BROKEN = True

dist.init_process_group("gloo")
strategy = FSDPStrategy(state_dict_type="sharded")
model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
strategy.model = strategy._model = model
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# Without "optimizer_states", as the trainer dumps a checkpoint of weights only.
checkpoint: dict[str, object] = {"state_dict": model.state_dict()} | (
    {} if BROKEN else {"optimizer_states": []}
)
strategy.save_checkpoint(checkpoint, "weights")
