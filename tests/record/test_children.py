"""Scripts that start their ranks themselves: every process that trains is seen, no other."""

import json
import subprocess
from pathlib import Path

import pytest

from recompute_scan.result.run_record import run_records_in
from tests.record.runs import LAYERS, QUICK, tool, write_script

SCRIPT = (
    LAYERS
    + """\
import os
import torch.distributed as dist

class Block(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)

def train(rank, world_size, address, steps):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(
        [torch.randn(8) for _ in range(400)], batch_size=4, num_workers=1
    )
    for step, x in enumerate(loader):
        if rank == 1 and step == steps:
            raise ValueError("lost")
        checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.destroy_process_group()

def log(queue):
    print("heard", queue.get())

if __name__ == "__main__":
    way, steps = sys.argv[1], int(sys.argv[2])
    address = f"file://{os.getcwd()}/store"
    if way == "torch":
        torch.multiprocessing.spawn(train, (2, address, steps), nprocs=2)
    else:
        context = torch.multiprocessing.get_context("fork")
        queue = context.Queue()
        helper = context.Process(target=log, args=(queue,))
        helper.start()
        ranks = [context.Process(target=train, args=(n, 2, address, steps)) for n in (0, 1)]
        for process in ranks:
            process.start()
        queue.put("all")
        helper.join()
        for process in ranks:
            process.join()
    print("after")
"""
)


def run(folder: Path, way: str, steps: int) -> subprocess.CompletedProcess[str]:
    write_script(folder, SCRIPT)
    return tool(folder, "run", *QUICK, "-o", "out", "train.py", way, str(steps))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch", "fork"])
def test_each_rank_is_seen_and_one_reports(tmp_path: Path, way: str) -> None:
    done = run(tmp_path, way, -1)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["verdict"], result["recompute_per_backward"]) == ("doubled", 2.0)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert done.stdout.count("Verdict: doubled") == 1
    # What follows the training would miss what it was to leave: the script ends with it.
    assert "\nafter\n" not in done.stdout
    assert done.stdout.startswith("heard all\n" if way == "fork" else "Verdict")
    records = run_records_in(tmp_path / "out")
    assert [(one.rank, one.world_size, one.status) for one in records] == [
        (0, 2, "complete"),
        (1, 2, "complete"),
    ]


@pytest.mark.slow
def test_a_failure_in_one_is_the_script_s_and_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "torch", 3)
    assert done.returncode == 1
    assert "ProcessRaisedException" in done.stderr
    assert "Rank 1 raised ValueError at train.py:" in done.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["crash"]["rank"] == 1
