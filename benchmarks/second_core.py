"""Large plain files read by two processes and by one, in turn, each time in a fresh process.

python benchmarks/second_core.py TRACE [TRACE ...] --runs 7
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

_ONE = Path(__file__).with_name("load_one.py")


def seconds(way: str, trace: Path) -> float:
    """What one load takes, imports done before."""
    command = [sys.executable, str(_ONE), way, str(trace)]
    done = subprocess.run(command, capture_output=True, check=True)
    return float(json.loads(done.stdout)["seconds"])


def main() -> None:
    """Print the table: all times, the ratio of their medians, and the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    print("| file | two processes, s | one, s | medians | pairs |")
    print("| --- | --- | --- | ---: | ---: |")
    for trace in options.traces:
        pairs = [
            (seconds("ours", trace), seconds("ours-alone", trace)) for _ in range(options.runs)
        ]
        together, alone = zip(*pairs, strict=True)
        of_medians = median(alone) / median(together)
        of_pairs = median(one / two for two, one in pairs)
        times = (", ".join(f"{time:.2f}" for time in times) for times in (together, alone))
        print(f"| {trace.stem} | {' | '.join(times)} | {of_medians:.2f} | {of_pairs:.2f} |")


if __name__ == "__main__":
    main()
