"""The diff of RS001, applied to a copy of an example, leaves one recompute and the same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.result import Result, from_json
from tests.record.runs import plain_environment

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--steps", "12", "--batch-size", "2", "--sequence-length", "32")


def scanned(folder: Path, script: str, *args: str) -> tuple[Result, list[str]]:
    """The result of a whole run, and the losses that the script printed."""
    options = ["--steps", "2", "--warmup", "2", "--timing-steps", "2", "--keep-going", "-o", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "recompute_scan", "run", *options, script, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=plain_environment(),
    )
    assert done.returncode == 0, done.stderr
    losses = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    return from_json((folder / "out" / "result.json").read_text()), losses


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("doubled_llama_fsdp.py", SMALL),
        ("plain_pytorch.py", (*SMALL, "--checkpoint", "twice")),
    ],
)
def test_the_diff_changes_the_verdict_and_not_the_losses(
    tmp_path: Path, name: str, args: tuple[str, ...]
) -> None:
    source = (EXAMPLES / name).read_text()
    exact = source.replace("{loss.item():.4f}", "{loss.item().hex()}")
    assert exact != source
    (tmp_path / name).write_text(exact)
    before, losses_before = scanned(tmp_path, name, *args)
    assert (before.verdict, before.recompute_per_backward) == ("doubled", 2.0)
    (finding,) = [finding for finding in before.findings if finding.code == "RS001"]
    assert finding.fix is not None
    assert finding.fix.diff is not None
    subprocess.run(["git", "apply", "-"], input=finding.fix.diff.encode(), cwd=tmp_path, check=True)
    after, losses_after = scanned(tmp_path, name, *args)
    assert (after.verdict, after.recompute_per_backward) == ("full", 1.0)
    assert after.findings == ()
    assert len(losses_before) > 2
    assert all("0x1." in line for line in losses_before)
    assert losses_after == losses_before
