"""Processes that a run starts import the package, and not a file of its name where they start."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LAUNCHES = (
    ("--nproc-per-node", "1"),
    pytest.param(("--verify",), marks=pytest.mark.slow),  # the whole script several times
    ("--", sys.executable, "-m", "torch.distributed.run", "--standalone"),
)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda words: words[0])
def test_a_file_of_the_packages_name_is_not_imported(
    launch: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text(SCRIPT, encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    (here / "recompute_scan.py").write_text("open('imported', 'w').close()\n", encoding="utf-8")
    quick = ("--steps", "1", "--warmup", "1", "--timing-steps", "1", "-o", "out")
    tool = str(Path(sys.executable).with_name("recompute-scan"))
    command = [tool, "run", *quick, *launch, "../elsewhere/train.py"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert not (here / "imported").exists()
