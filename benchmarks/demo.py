"""The demo again and again: does the measured saving lie inside the predicted interval?

    python benchmarks/demo.py                 ten runs
    python benchmarks/demo.py --runs 3 --folder FOLDER

Each run is what ``make demo`` does: ``recompute-scan run --steps 5 --verify`` of the doubled
example, whose fix is then measured in turn with the unchanged script. One line a run, printed when
it ends, with the load of the machine at its beginning (``/proc/loadavg``, one minute). A run that
gave no figure is said to have given none, and counts as not inside. The exit status is 1 where
fewer than nine in ten are inside.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import recompute_scan as rs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import processor, versions
from examples.read_results import step_figures

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "recompute_scan", "run", "--steps", "5", "--verify")
EXAMPLE = "examples/doubled_llama_fsdp.py"
WANTED = 0.9
_TITLES = ("run", "load", "before", "predicted (interval)", "measured", "inside", "took")
_LINE = "{:>3}  {:>5}  {:>9}  {:>27}  {:>9}  {:<7}  {:>6}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where the recordings stay")
    asked = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} cores, {versions(('torch', 'transformers'))}")
    print("times in ms per step, interval of 95 %\n")
    print(_LINE.format(*_TITLES), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch)
        inside = sum(one_run(number, folder / f"run-{number}") for number in range(asked.runs))
    print(f"\n{inside} of {asked.runs} inside the predicted interval")
    return int(inside < WANTED * asked.runs)


def one_run(number: int, folder: Path) -> bool:
    """Run the demo once and print its line; whether it confirmed itself."""
    load, began = os.getloadavg()[0], time.monotonic()
    ended = subprocess.run(
        (*COMMAND, "-o", str(folder), EXAMPLE),
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    took = f"{time.monotonic() - began:.0f} s"
    result = folder / "result.json"
    if not result.exists():
        print(f"{number + 1:>3}  {load:5.1f}  no result, exit status {ended.returncode}")
        print(ended.stderr[-2000:], file=sys.stderr, flush=True)
        return False
    scan = rs.load_result(result)
    figures = step_figures(scan)
    if figures is None:
        verified = scan.result.verified
        outcome = verified.outcome if verified else "not verified"
        row = ("-", "-", "-", f"no ({outcome})")
    else:
        row = (
            f"{figures.before:.1f}",
            f"{figures.predicted:.1f} ({figures.low:.1f} to {figures.high:.1f})",
            f"{figures.measured:.1f}",
            "yes" if figures.inside else "no",
        )
    print(_LINE.format(number + 1, f"{load:.1f}", *row, took), flush=True)
    return figures is not None and figures.inside


if __name__ == "__main__":
    sys.exit(main())
