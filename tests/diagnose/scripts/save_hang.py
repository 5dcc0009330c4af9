"""A save that only rank 0 calls, though every rank has a part in it; the others wait elsewhere."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

BROKEN = True


def save_checkpoint(model: FullyShardedDataParallel, path: Path) -> None:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    torch.save(state, path)


torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
if dist.get_rank() == 0 or not BROKEN:
    save_checkpoint(model, Path(sys.argv[1]))
dist.barrier()
