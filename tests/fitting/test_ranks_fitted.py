"""Two processes with one model: one arrangement, the same losses."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks._frame import fresh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recompute_scan
from tests.fitting.models import LIMIT, WORDS, Net, loss_of


def training(way: str, *, fit: bool) -> tuple[Net, list[float]]:
    torch.manual_seed(0)
    model = wrapped = Net("dropout")
    if fit and not way.endswith("after"):
        recompute_scan.fit(model, LIMIT, quiet=True)
    if way.startswith("ddp"):
        wrapped = DistributedDataParallel(model)  # type: ignore[assignment]
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if fit and way.endswith("after"):
        recompute_scan.fit(wrapped, LIMIT, quiet=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    rank, found = dist.get_rank(), []
    torch.manual_seed(rank)
    for step in range(36):
        length = 24 if step > 20 and rank else 16
        loss = loss_of(wrapped, torch.randint(0, WORDS, (4, length)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return model, found


def main() -> None:
    dist.init_process_group("gloo")
    for way in sys.argv[1].split(","):
        losses = training(way, fit=False)[1]
        model, found = training(way, fit=True)
        control = recompute_scan.fitted(model)
        assert control is not None
        assert found == losses, way
        assert control.settled
        assert control.failure is None
        mine = [one.choice for one in control._switch.layers]
        each: list[list[int]] = [[], []]
        dist.all_gather_object(each, mine)
        assert each[0] == each[1], way
        assert {0, 1} <= set(mine), way
        control.stop()
    dist.destroy_process_group()
    print("all alike")


# Each wrapper around a fitted model, and inside one.
@pytest.mark.parametrize(
    "ways", ["ddp,fsdp2-after", pytest.param("ddp-after,fsdp2", marks=pytest.mark.slow)]
)
def test_two_ranks_have_one_arrangement(ways: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    module = ["--local-addr=127.0.0.1", "--nproc-per-node=2", "-m", f"tests.fitting.{NAME}"]
    done = fresh([*launcher, *module, ways], timeout_s=120)
    assert done.output.count("all alike") == 2, done.output


NAME = Path(__file__).stem

if __name__ == "__main__":
    main()
