"""Record the doubled example and its repaired twin in turn, and say whether they agree.

    python benchmarks/twins.py FOLDER                 three rounds
    python benchmarks/twins.py FOLDER --rounds 5 --keep

One round is one recording of each, as those in ``traces`` were made, the first of the two changing
from round to round. A line says what the doubled recording predicts and what ``compare`` finds in
the twin. Of the rounds, the one to keep is that whose timed steps spread least: chosen without a
look at whether it agrees. Rounds that FOLDER holds already are not recorded again, so that more
can be added. The exit status is 1 where that one's twin is outside the prediction, or
where its steps spread so much (their middle half by a tenth) that they should be recorded again.
With ``--keep`` and 0 that round goes into ``traces``, without the host's name, the paths of the
recording and the step with stacks; without it nothing is written there.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

import msgspec

import recompute_scan as rs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import processor, versions

ROOT = Path(__file__).resolve().parents[1]
TWINS = ("doubled_llama_fsdp", "repaired_llama_fsdp")
TRACE = "trace-rank0.json.gz"
TOO_WIDE = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="put that round into traces")
    asked = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} cores, {versions(('torch', 'transformers'))}")
    print("round   load     before         predicted (interval)      twin  inside  spread")
    rounds = [record(number, asked.folder / f"round-{number}") for number in range(asked.rounds)]
    spread, inside, kept = min(rounds)
    print(f"least spread: {kept}, the twin {'inside' if inside else 'outside'} the prediction")
    if spread > TOO_WIDE:
        print("The steps spread too much to say so: record again while nothing else runs.")
    if spread > TOO_WIDE or not inside:
        return 1
    if asked.keep:
        for name in TWINS:
            keep(Path(kept) / name, ROOT / "traces" / name)
    return 0


def record(number: int, folder: Path) -> tuple[float, bool, str]:
    """One round: the wider spread of both, whether the twin is inside, and its folder."""
    load = os.getloadavg()[0]
    for name in TWINS if number % 2 == 0 else TWINS[::-1]:
        command = (sys.executable, "-m", "recompute_scan", "run", "--steps", "2")
        output = ("-o", str(folder / name), f"examples/{name}.py")
        if not (folder / name / "result.json").exists():
            subprocess.run((*command, *output), check=True, cwd=ROOT, capture_output=True)
    doubled = rs.analyze(folder / TWINS[0]).result.cost
    repaired = rs.analyze(folder / TWINS[1]).result.cost
    assert doubled is not None and repaired is not None
    inside = doubled.predicted_low_ms <= repaired.step_ms <= doubled.predicted_high_ms
    spread = max(spread_of(folder / name / "run-rank0.json") for name in TWINS)
    likely = f"{doubled.predicted_low_ms:.1f} to {doubled.predicted_high_ms:.1f}"
    print(
        f"{number + 1:>5}  {load:5.1f}  {doubled.step_ms:9.1f}  "
        f"{f'{doubled.predicted_step_ms:.1f} ({likely})':>27}  {repaired.step_ms:8.1f}  "
        f"{'yes' if inside else 'no':<6}  {spread:6.1%}",
        flush=True,
    )
    return spread, inside, str(folder)


def keep(recorded: Path, shipped: Path) -> None:
    """The trace and its run record, as they are shipped."""
    shutil.copyfile(recorded / "run-rank0.json", shipped / "run-rank0.json")
    trace = gzip.decompress((recorded / TRACE).read_bytes()).decode()
    for name, value in (("host_name", "host"), ("traceName", TRACE.removesuffix(".gz"))):
        trace, found = re.subn(rf'("{name}": )"[^"]*"', rf'\1"{value}"', trace)
        if found != 1:
            raise ValueError(f"{found} times {name} in {recorded / TRACE}")
    (shipped / TRACE).write_bytes(gzip.compress(trace.encode(), mtime=0))


def spread_of(path: Path) -> float:
    """How far apart the quarters of the timed steps are, as a share of their median."""
    steps = msgspec.json.decode(path.read_bytes())["timed_steps_ms"]
    first, _, third = quantiles(steps, n=4)
    return float((third - first) / median(steps))


if __name__ == "__main__":
    sys.exit(main())
