"""What a run leaves behind holds no argument of the script and nothing of its environment."""

import gzip
import json
from pathlib import Path

import pytest

from tests.record.runs import QUICK, tool
from tests.share.canaries import plant_folder

TRACE = Path(__file__).parents[2] / "traces" / "doubled_llama_fsdp"

SCRIPT = """
import sys
import torch

assert sys.argv[1:] == ["--token", "zqcanary-argument"]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_arguments_and_environment_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [*QUICK, "-o", "out", "train.py", "--token", "zqcanary-argument"]
    done = tool(tmp_path, "run", *words, API_KEY="zqcanary-environment")
    assert done.returncode == 0, done.stderr
    files = [file for file in (tmp_path / "out").iterdir() if file.is_file()]
    assert {"result.json", "report.html", "run-rank0.json"} <= {file.name for file in files}
    for file in files:
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        assert b"zqcanary" not in data.lower(), file.name


DOUBLED = """
import torch
from torch.utils.checkpoint import checkpoint

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())

def inner(x):
    return checkpoint(model, x, use_reentrant=False)

for _ in range(80):
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(inner, x, use_reentrant=False).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_canaries_are_planted_in_every_file_that_runs_leave(tmp_path: Path) -> None:
    """With what tells most: stacks, further runs, gradients, the guard, events."""
    (tmp_path / "train.py").write_text(DOUBLED)
    few = ["--steps", "2", "--warmup", "2", "--timing-steps", "2"]
    left = set()
    for options in (["--verify", *few], ["--fidelity"], ["--guard"]):
        out = tmp_path / options[0]
        told = ["--events", str(out / "events.jsonl"), "-o", str(out)]
        out.mkdir()
        done = tool(tmp_path, "run", *options, *told, "train.py")
        assert done.returncode == 0, (options, done.stderr)
        left |= {file.name for file in out.rglob("*") if file.is_file()}
    planted = tmp_path / "planted"
    document = json.loads(gzip.decompress((TRACE / "trace-rank0.json.gz").read_bytes()))
    plant_folder(planted, document, json.loads((TRACE / "run-rank0.json").read_bytes()))
    assert {"events.jsonl", "guard-rank0.json", "trace-rank0.json.gz"} <= left
    assert left <= {file.name for file in planted.rglob("*") if file.is_file()}
