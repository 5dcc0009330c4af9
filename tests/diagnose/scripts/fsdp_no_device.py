"""FSDP on a machine without a GPU, without being told to use the CPU."""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
FullyShardedDataParallel(nn.Linear(8, 8))
