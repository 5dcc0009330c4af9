# pytorch/pytorch#136766: zero-bubble pipeline (backward split into input and weight part) over checkpointed layers
import os, torch, torch.distributed as dist
from torch import nn
from blocks import Block
from torch.utils.checkpoint import checkpoint
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, Schedule1F1B


class Chunk(nn.Module):
    def __init__(s, d, n):
        super().__init__()
        s.blocks = nn.ModuleList(Block(d) for _ in range(n))

    def forward(s, x):
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return x


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
d = 128
torch.manual_seed(0)
chunks = [Chunk(d, 2) for _ in range(2 * world)]
mine = [rank, rank + world]
stages = [
    PipelineStage(chunks[i], i, 2 * world, torch.device("cpu"), input_args=(torch.randn(4, 32, d),))
    for i in mine
]
sched = ScheduleInterleavedZeroBubble(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
params = [p for i in mine for p in chunks[i].parameters()]
opt = torch.optim.AdamW(params, 1e-4)
for step in range(30):
    x = torch.randn(16, 32, d)
    opt.zero_grad()
    losses = []
    if rank == 0:
        sched.step(x)
    elif rank == world - 1:
        sched.step(target=x, losses=losses)
    else:
        sched.step()
    opt.step()
    if rank == world - 1 and step % 10 == 0:
        print(step, sum(l.item() for l in losses))
dist.destroy_process_group()
