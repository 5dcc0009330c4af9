"""Ranges inside regions break no policy's recompute: FSDP2 on two processes, with experts."""

import json
from pathlib import Path

from tests.record.runs import run_plain

SCRIPT = Path(__file__).with_name("sharded_policy.py")
STEPS = 7


def _losses(command: list[str], folder: Path) -> list[str]:
    done = run_plain(folder, "-m", *command, STEPS=str(STEPS))
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("loss"))


def test_training_is_the_same_and_each_rank_sees_its_policy(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29641"]
    plain = _losses([*launcher, str(SCRIPT)], tmp_path)
    options = ["--steps", "2", "--warmup", "1", "--timing-steps", "1", "--output", "out"]
    tool = ["-m", "recompute_scan", "run", "--keep-going", *options, str(SCRIPT)]
    assert _losses([*launcher, *tool], tmp_path) == plain
    assert len(plain) == 2 * STEPS
    for rank in (0, 1):
        record = json.loads((tmp_path / "out" / f"run-rank{rank}.json").read_text())
        (policy,) = record["policies"]["policies"]
        assert policy["regions"] == policy["recomputes"] == 3
        met = {one["name"]: one for one in policy["operators"]}
        assert met["aten.addmm.default"]["met"] == met["aten.addmm.default"]["kept"] == 5
        assert met["aten.tanh.default"]["recomputed"] == 4
