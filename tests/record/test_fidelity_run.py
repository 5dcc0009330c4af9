"""`run` on a BERT whose checkpoints drop the random state of its dropout, and on its repair."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.result import Result, from_json

EXAMPLE = Path(__file__).parents[2] / "examples" / "dropout_bert.py"
QUICK = ["--steps", "1", "--timing-steps", "1", "--warmup", "1"]


def run(folder: Path, *options: str) -> Result:
    command = [sys.executable, "-m", "recompute_scan", "run", *QUICK, "-o", "out", *options]
    done = subprocess.run(
        [*command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return from_json((folder / "out" / "result.json").read_bytes())


@pytest.mark.slow
def test_the_fault_is_named_measured_and_repaired_by_the_diff(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "train.py")
    wrong = run(tmp_path, "--verify")
    (finding,) = [one for one in wrong.findings if one.code == "RS401"]
    assert "sdpa_attention.py" in finding.detail
    assert "attention.self" in finding.detail
    assert wrong.verified is not None
    assert wrong.verified.gradients is not None
    assert wrong.verified.gradients.status == "different"
    assert any((one.distance or 0) > 0.1 for one in wrong.verified.gradients.worst)
    assert finding.fix is not None
    assert finding.fix.diff is not None
    subprocess.run(
        ["git", "apply", "-"], cwd=tmp_path, input=finding.fix.diff, text=True, check=True
    )
    right = run(tmp_path, "--verify")
    assert not [one for one in right.findings if one.wrong_gradients]
    assert right.verified is not None
    assert right.verified.gradients is not None
    assert right.verified.gradients.status == "equal"
    assert right.fidelity is not None
    assert all(not one.differences for one in right.fidelity.regions)


@pytest.mark.slow
def test_the_step_can_be_left_out(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "train.py")
    assert run(tmp_path, "--no-fidelity").fidelity is None
