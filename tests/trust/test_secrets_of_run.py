"""What a run leaves behind holds no argument of the script and nothing of its environment."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    options = ["--steps", "1", "--warmup", "1", "--timing-steps", "1", "-o", "out"]
    script = ["train.py", "--token", "zqcanary-argument"]
    done = subprocess.run(
        [sys.executable, "-m", "recompute_scan", "run", *options, *script],
        cwd=tmp_path,
        env={**os.environ, "API_KEY": "zqcanary-environment", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
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
        done = subprocess.run(
            [sys.executable, "-m", "recompute_scan", "run", *options, *told, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (options, done.stderr)
        left |= {file.name for file in out.rglob("*") if file.is_file()}
    planted = tmp_path / "planted"
    document = json.loads(gzip.decompress((TRACE / "trace-rank0.json.gz").read_bytes()))
    plant_folder(planted, document, json.loads((TRACE / "run-rank0.json").read_bytes()))
    assert {"events.jsonl", "guard-rank0.json", "trace-rank0.json.gz"} <= left
    assert left <= {file.name for file in planted.rglob("*") if file.is_file()}
