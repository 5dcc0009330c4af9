"""``recompute-scan plan`` with two processes: one plan, applied and proven on both alike."""

import json
from pathlib import Path

import pytest

from recompute_scan.cost.plan import arm_of_way
from recompute_scan.result import from_json
from recompute_scan.result.run_record import read_rehearsals
from tests.present import present
from tests.record.runs import tool

# Each rank prints for every step how often each of its layers ran in the backward pass.
SCRIPT = """\
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down, self.again = nn.Linear(32, hidden), nn.Linear(hidden, 32), 0

    def forward(self, x):
        self.again += torch._C._current_graph_task_id() != -1
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, (128, 64, 256, 64)))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = Model()
mesh = init_device_mesh("cpu", (2,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    # More on the second rank: what fits there fits on the first.
    model(torch.randn(16 + 16 * rank, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps([rank, *(layer.again for layer in model.layers)]), flush=True)
    for layer in model.layers:
        layer.again = 0
"""


@pytest.mark.slow
def test_a_plan_is_made_for_all_ranks_and_proven_on_each(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    out = tmp_path / "out"
    arguments = ["--timing-steps", "2", "--steps", "1", "--nproc-per-node", "2", "-o", str(out)]
    done = tool(Path.cwd(), "plan", *arguments, "--memory", "180%", script)
    assert done.returncode == 0, done.stderr
    made = present(from_json((out / "result.json").read_bytes()).plan)
    assert made.proof.ranks == 2
    proof = max((out / "plan").glob("proof-*"))
    shown = read_rehearsals(proof)
    peaks = [arm_of_way(one.arms, "chosen").saved_bytes or 0 for one in shown]
    assert peaks[0] < peaks[1] == made.proof.peak_bytes == made.plan.peak_bytes
    assert peaks[1] <= present(made.budget_bytes)
    planned = [int(one.recompute) for one in made.modules]
    assert 0 < sum(planned) < 4
    lines = (proof / "output.txt").read_text("utf-8").splitlines()
    printed = [json.loads(line) for line in lines if line.startswith("[")]
    ran = [[again for who, *again in printed if who == rank] for rank in range(2)]
    assert ran[0] == ran[1]
    assert {tuple(again) for again in ran[0]} == {(1, 1, 1, 1), tuple(planned)}
