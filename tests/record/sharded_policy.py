"""FSDP2 on each of two processes, blocks with a policy, one of them with experts: run by a test.

Each block opens a range of the profiler's inside its checkpoint; what the gradients sum to is
printed, for with and without a recording.
"""

import functools
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH = 16
CONTEXT = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)


class Experts(nn.Module):
    """Each row goes to the expert that the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("experts"):
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero().squeeze(-1)
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
            return torch.addcmul(x, out, weight.unsqueeze(-1))


class Block(nn.Module):
    """A block that opens a range."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("block"):
            return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    """Blocks, each in a checkpoint with the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Experts(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=CONTEXT)
        return x


def main() -> None:
    """Train some steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(int(os.environ["STEPS"])):
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        # In one piece: two processes write to the same pipe.
        os.write(1, f"loss {dist.get_rank()} {number} {loss.item().hex()}\n".encode())
    # gloo's thread lets go of a collective after whoever waited for it has gone on. What it lets go
    # of needs Python's lock: a process in which Python has ended by then aborts.
    dist.barrier()
    time.sleep(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
