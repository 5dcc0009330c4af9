"""Several ranks: each records itself, and each knows which one it is."""

import gzip
import json
import threading
import time
from pathlib import Path

import pytest

from recompute_scan.record import launch as launching
from recompute_scan.record.launch import wait_for_ranks
from recompute_scan.result.run_record import write_run_info, write_so_far
from tests.record.runs import (
    LAYERS,
    TORCHRUN,
    record_script,
    run_info,
    run_plain,
    write_script,
)

FSDP = (
    LAYERS
    + """\
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

class Block(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)

dist.init_process_group("gloo")
model = FullyShardedDataParallel(
    nn.Sequential(*(Block() for _ in range(3))),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    device_id=torch.device("cpu"),
)
apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
while True:
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    optimizer.step()
"""
)


@pytest.mark.slow
def test_every_rank_records_its_own(tmp_path: Path) -> None:
    recorded = record_script(tmp_path, FSDP, launcher=TORCHRUN, timing_steps=2, steps=2)
    assert recorded.status == 0, recorded.stderr
    assert "destroy_process_group" not in recorded.stderr
    for rank in (0, 1):
        info = recorded.account(rank)
        assert (info.rank, info.world_size, info.status) == (rank, 2, "complete")
        assert info.environment["backend"] == "gloo"
        assert (info.trace, info.profiled_steps) == (f"trace-rank{rank}.json.gz", 2)
        assert len(info.timed_steps_ms) == 2
        with gzip.open(recorded.output / f"trace-rank{rank}.json.gz") as file:
            assert json.load(file)["distributedInfo"]["rank"] == rank
        trace = recorded.trace(f"trace-rank{rank}.json.gz")
        outer = [annotation for annotation in trace.regions if annotation.depth == 0]
        assert [(m.module, m.mechanism) for m in outer] == [
            (str(index), "fsdp-wrapper") for index in range(3)
        ] * 2
        assert {one.variant for one in trace.regions if one.depth == 1} == {"reentrant"}
        assert len(trace.recomputes) == 2 * 2 * 3
        assert (recorded.output / f"stacks-rank{rank}.json.gz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 3])
def test_launch_passes_the_status_on(tmp_path: Path, status: int) -> None:
    write_script(
        tmp_path,
        LAYERS
        + "import os\n"
        + "model = Layer()\n"
        + "optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        + "for _ in range(9):\n"
        + "    checkpoint(model, torch.randn(4, 8), use_reentrant=False).sum().backward()\n"
        + "    optimizer.step()\n"
        + f"sys.exit({status} if os.environ['RANK'] == '1' else 0)\n",
    )
    start = write_script(
        tmp_path,
        """\
        from recompute_scan.record.launch import launch
        options = ["--timing-steps", "0", "--steps", "1", "--keep-going", "-o", "out"]
        print("status", launch(2, ["run", *options, "train.py"]))
        """,
        "start.py",
    )
    done = run_plain(tmp_path, str(start))
    assert done.stdout.endswith(f"status {status}\n"), done.stderr
    assert wait_for_ranks(tmp_path / "out", 2, 0) == [0, 1]


def test_waiting_ends_with_the_last_run_record(tmp_path: Path) -> None:
    write_run_info(tmp_path, run_info(0))
    late = threading.Timer(0.3, lambda: write_run_info(tmp_path, run_info(1)))
    late.start()
    begin = time.monotonic()
    assert wait_for_ranks(tmp_path, 2, 30) == [0, 1]
    assert 0.2 < time.monotonic() - begin < 10
    late.join()


def test_only_a_rank_that_records_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_SIGN_S", 0.1)
    write_run_info(tmp_path, run_info(0))
    begin = time.monotonic()
    assert wait_for_ranks(tmp_path, 2, 30) == [0]
    assert time.monotonic() - begin < 10
    write_so_far(tmp_path, run_info(1))
    assert wait_for_ranks(tmp_path, 2, 0.5) == [0]
    late = threading.Timer(0.5, lambda: write_run_info(tmp_path, run_info(1)))
    late.start()
    assert wait_for_ranks(tmp_path, 2, 30) == [0, 1]
    late.join()


def test_waiting_gives_up_on_missing_and_broken_run_records(tmp_path: Path) -> None:
    write_run_info(tmp_path, run_info(0))
    (tmp_path / "run-rank1.json").write_text("{")
    assert wait_for_ranks(tmp_path, 3, 0.2) == [0]
