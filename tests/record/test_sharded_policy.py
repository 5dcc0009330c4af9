"""Ranges inside regions break no policy's recompute: FSDP2 on two processes, with experts."""

import json
import socket
from pathlib import Path
from typing import Any

from tests.record.runs import plain_environment, run_jobs

SCRIPT = Path(__file__).with_name("sharded_policy.py")
STEPS = 7


def _ranks(folder: Path, options: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Both ranks of a job, each in a fork of a process that has torch; recorded with options."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**plain_environment(), **group, "STEPS": str(STEPS)}
    return [
        {
            "script": str(SCRIPT),
            "options": options,
            "environment": {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            **{end: f"{folder}/{bool(options)}{rank}.{end}" for end in ("out", "err")},
        }
        for rank in (0, 1)
    ]


def _losses(job: dict[str, Any]) -> list[str]:
    lines = Path(job["out"]).read_text().splitlines()
    return [line for line in lines if line.startswith("loss")]


def test_training_is_the_same_and_each_rank_sees_its_policy(tmp_path: Path) -> None:
    options = {"steps": 2, "warmup": 1, "timing_steps": 1, "keep_going": True}
    plain = _ranks(tmp_path, None)
    recorded = _ranks(tmp_path, {**options, "output": str(tmp_path / "out")})
    jobs = [*plain, *recorded]
    for job, (status, *_) in zip(jobs, run_jobs(jobs, tmp_path, 2), strict=True):
        assert status == 0, Path(job["err"]).read_text()[-3000:]
    for rank in (0, 1):
        assert _losses(recorded[rank]) == _losses(plain[rank])
        assert len(_losses(plain[rank])) == STEPS
        record = json.loads((tmp_path / "out" / f"run-rank{rank}.json").read_text())
        (policy,) = record["policies"]["policies"]
        assert policy["regions"] == policy["recomputes"] == 3
        met = {one["name"]: one for one in policy["operators"]}
        assert met["aten.addmm.default"]["met"] == met["aten.addmm.default"]["kept"] == 5
        assert met["aten.tanh.default"]["recomputed"] == 4
