"""``run --guard``: an unchanged script to its own end, with its output and its status."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from recompute_scan.events import ChangeTold, CommandEnded
from tests.record.runs import run_plain
from tests.test_events import events_in

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
from tests.guard import nets
from tests.guard.nets import Net, train_step

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
change = int(sys.argv[1])
for number in range(1, 51):
    if number == change:
        net.how[2] = nets.plainly
    print(train_step(net, optimizer))
sys.exit(7)
"""


def started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return run_plain(folder, *words, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


def guarded(folder: Path, change: int) -> subprocess.CompletedProcess[str]:
    run = ("-m", "recompute_scan", "run", "--guard", "--events", "events.jsonl", "-o", "out")
    return started(folder, *run, "train.py", str(change))


TWO = """
import torch
from torch.utils.checkpoint import checkpoint

one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (one, other)]
for _ in range(10):
    x = torch.randn(2, 4, requires_grad=True)
    inner = lambda x: checkpoint(one, x, use_reentrant=True)
    checkpoint(inner, x, use_reentrant=False).sum().backward()
    optimizers[0].step()
    other(torch.randn(2, 4)).sum().backward()
    optimizers[1].step()
"""


@pytest.mark.slow
def test_the_last_line_counts_steps_once_and_says_that_it_is_doubled(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    done = started(tmp_path, "-m", "recompute_scan", "run", "--guard", "-o", "out", "two.py")
    assert "10 steps guarded: nothing changed" in done.stderr
    assert "1 block recomputed twice" in done.stderr
    assert "recompute-scan run says" in done.stderr


@pytest.mark.slow
def test_output_and_status_are_the_scripts_and_a_change_is_told(tmp_path: Path) -> None:
    plain = started(tmp_path, "train.py", "40")
    one = guarded(tmp_path, 40)
    assert (one.returncode, one.stdout) == (plain.returncode, plain.stdout) == (7, plain.stdout)
    assert "From step 40 on, blocks.2 is recomputed 0 times per forward, 1 before" in one.stderr
    assert "train.py" in one.stderr or "nets.py" in one.stderr
    told = json.loads((tmp_path / "out" / "guarded-rank0.json").read_text())
    assert told["steps"] == 50
    assert told["failure"] is None
    assert [(c["kind"], c["step"], c["modules"]) for c in told["changes"]] == [
        ("off", 40, ["blocks.2"])
    ]
    *_, change, ended = events_in((tmp_path / "events.jsonl").read_bytes())
    assert isinstance(change, ChangeTold)
    assert (change.kind, change.step, change.modules) == ("off", 40, ("blocks.2",))
    assert isinstance(ended, CommandEnded)
    assert ended.exit_status == 7
    # The next run in this folder is compared with that one, from its first step on.
    again = guarded(tmp_path, 1)
    assert again.returncode == 7
    assert "50 steps" not in again.stderr
    assert json.loads((tmp_path / "out" / "guarded-rank0.json").read_text())["changes"] == []


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_is_refused_before_the_script(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "guard-rank0.json").write_text("{}x")
    refused = guarded(tmp_path, 40)
    assert refused.stdout == ""
    assert refused.returncode not in (0, 7)
    assert "E351" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_the_script_runs_where_what_was_told_cannot_be_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "guarded-rank0.json").mkdir(parents=True)  # a folder in the file's place
    one = guarded(tmp_path, 40)
    assert one.returncode == 7
    assert one.stdout.count("0x") == 50
    assert "Traceback" not in one.stderr
