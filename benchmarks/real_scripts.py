"""Training scripts that people have, run on tiny models: the verdict beside a count of its own.

    python benchmarks/real_scripts.py SOURCES               all rows whose sources are there
    python benchmarks/real_scripts.py SOURCES nanoGPT TRL   those whose name begins so

SOURCES holds checkouts: nanoGPT, minGPT, examples (of pytorch), peft, pytorch-image-models,
diffusers; TRL's scripts come from its package. Each script runs twice: as it is, counted by
``counting_main.py``, and under ``recompute-scan run``; a doubled one under ``--verify``. Ends with
1 where a verdict differs from the count, or where a script that runs without us fails with us.
Nothing is fetched from a hub.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.real_inputs import make
from benchmarks.real_rows import ROWS, Row

HERE = Path(__file__).resolve().parent
COUNTER = str(HERE / "counting_main.py")
TOOL = (sys.executable, "-m", "recompute_scan", "run", "--steps", "1", "--warmup", "1")
TIMEOUT_S = 420


class Outcome(NamedTuple):
    """What one row gave: the count, the verdict, and whether they agree."""

    truth: str
    verdict: str
    fix: str
    right: bool


def run(command: list[str], where: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """One program, offline, with one thread."""
    paths = [str(where.parent.parent), str(where), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "hub"),
        "WANDB_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        return subprocess.run(
            command,
            cwd=where,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, f"ended after {TIMEOUT_S} s")


def attempt(row: Row, sources: Path, inputs: Path, scratch: Path) -> Outcome | None:
    """Both runs of one row; ``None`` where its source is not there or does not run here."""
    where = scratch / "work"
    if row.source:
        if not (sources / row.source).is_dir():
            print(f"{row.name}: no {row.source} below {sources}")
            return None
        shutil.copytree(sources / row.source, where, symlinks=True)
        if row.change is not None:
            row.change(where / row.where)
        if row.source == "nanoGPT":
            shutil.copytree(inputs / "shakespeare_char", where / "data", dirs_exist_ok=True)
            shutil.copytree(
                inputs / "shakespeare_char", where / "data/shakespeare_char", dirs_exist_ok=True
            )
        if row.name == "minGPT chargpt":
            shutil.copy(inputs / "text.txt", where / row.where / "input.txt")
    where = where / row.where
    where.mkdir(parents=True, exist_ok=True)
    given = [
        part.replace("{in}", str(inputs)).replace("{out}", str(scratch)) for part in row.command
    ]
    counts = scratch / "counts.json"
    plain = run([sys.executable, COUNTER, str(counts), *given], where, scratch)
    if plain.returncode or not counts.exists():
        print(f"{row.name}: does not run here without us\n{plain.stdout[-600:]}")
        return None
    counted = json.loads(counts.read_text())
    doubled = counted["most"] >= 1.5
    verify = ["--verify"] if doubled else []
    out = scratch / "scan"
    timing = "6" if doubled else "1"
    ours = run([*TOOL, "--timing-steps", timing, *verify, "-o", str(out), *given], where, scratch)
    result = out / "result.json"
    truth = f"{counted['most']:.2g} in {counted['share']:.0%} of {counted['modules']}"
    if ours.returncode or not result.exists():
        return Outcome(truth, f"FAILED {ours.returncode}\n{ours.stdout[-900:]}", "", right=False)
    said = json.loads(result.read_text())
    return Outcome(truth, said["verdict"], _fix(said), right=_agrees(said, counted))


def _agrees(said: dict[str, Any], counted: dict[str, Any]) -> bool:
    """Whether the verdict is the one that the count asks for."""
    most = counted["most"]
    if most == 0:
        return bool(said["verdict"] == "none")
    if most >= 1.5:
        return bool(said["verdict"] == "doubled")
    return said["verdict"] in ("partial", "full")


def _fix(said: dict[str, Any]) -> str:
    """What was offered, and what became of it when it was measured."""
    verified = said.get("verified") or {}
    found = [
        finding["code"] for finding in said.get("findings", ()) if finding.get("status") == "found"
    ]
    if not verified:
        return ",".join(found)
    keys = ("outcome", "saving_pct", "same_losses", "losses", "recompute_per_backward")
    return f"{','.join(found)} " + ", ".join(f"{k} {verified[k]}" for k in keys if k in verified)


def main() -> int:
    """Print a line for each row as it is done, and the counts."""
    sources, only = Path(sys.argv[1]).resolve(), tuple(sys.argv[2:])
    rows = [row for row in ROWS if not only or row.name.startswith(only)]
    wrong = ran = unchanged = 0
    with tempfile.TemporaryDirectory(prefix="real") as kept:
        inputs = Path(kept) / "inputs"
        make(inputs)
        for row in rows:
            with tempfile.TemporaryDirectory(prefix="row") as scratch:
                outcome = attempt(row, sources, inputs, Path(scratch))
            if outcome is None:
                continue
            ran += 1
            wrong += not outcome.right
            unchanged += row.change is None
            how = "changed" if row.change else "unchanged"
            mark = "" if outcome.right else "  WRONG"
            print(
                f"{row.name:<34}{how:<10}{outcome.truth:<22}{outcome.verdict:<10}{outcome.fix}{mark}",
                flush=True,
            )
    print(f"{ran} rows of {len(rows)}, {unchanged} unchanged: {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
