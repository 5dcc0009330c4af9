"""Frozen and trainable parameters in one FSDP unit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model[0].requires_grad_(False)
FullyShardedDataParallel(model, device_id=torch.device("cpu"))
