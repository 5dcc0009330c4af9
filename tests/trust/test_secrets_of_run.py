"""What a run leaves behind holds no argument of the script and nothing of its environment."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
