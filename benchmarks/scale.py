"""Time and memory of analysing many ranks: against their number, by workers here and by Dask.

    python benchmarks/scale.py --ranks 8 32 128 512

Makes the ranks from one real trace: each is the trace again with its own rank, host and clock in
the header. Each measurement is a process of its own, ``recompute-scan analyze FOLDER``; it fails
unless every rank's row is in the result. Memory of the head process is its peak by the kernel's
count; that of all is the sum of the peaks of it and its workers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.clusters import local_cluster

from benchmarks.machine import processor, versions

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "traces" / "public" / "mi300x-resnet-checkpointed.json.gz"
# Nanoseconds by which the clocks of two hosts differ here.
CLOCK_OFFSET_NS = 7_000_000_123


@dataclass(frozen=True)
class Run:
    """One measurement: seconds, and peaks in MB of the head process and of all together."""

    seconds: float
    head_mb: float
    all_mb: float


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"[{TRACE.name}]")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128, 512])
    parser.add_argument("--workers", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--no-dask", action="store_true", help="leave out the LocalCluster")
    options = parser.parse_args()
    print(f"{processor()}; {versions(('recompute-scan', 'numpy', 'distributed'))}")
    print(f"trace: {options.trace.name}, {options.trace.stat().st_size / 1e6:.1f} MB compressed\n")
    print("| ranks | workers | s | ms a rank | head, peak MB | all processes, MB |")
    print("|---:|---|---:|---:|---:|---:|", flush=True)
    with (
        tempfile.TemporaryDirectory() as name,
        nullcontext() if options.no_dask else local_cluster() as address,
    ):
        for ranks in options.ranks:
            folder = Path(name) / str(ranks)
            make_ranks(options.trace, ranks, folder)
            ways = {f"{number} here": ["--workers", str(number)] for number in options.workers}
            if address:
                ways["2 of a LocalCluster"] = ["--dask", address]
            for way, arguments in ways.items():
                run = measure(folder, ranks, arguments)
                # A cluster's workers are not children of the head, and live on.
                whole = "-" if "--dask" in arguments else f"{run.all_mb:.0f}"
                print(
                    f"| {ranks} | {way} | {run.seconds:.1f} | {1000 * run.seconds / ranks:.0f} "
                    f"| {run.head_mb:.0f} | {whole} |",
                    flush=True,
                )
    return 0


def make_ranks(trace: Path, ranks: int, folder: Path) -> None:
    """A folder of so many traces. All share their events: a header of its own stands before."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    events = json.dumps(document.pop("traceEvents")).encode()
    # A gzip file may have several members: the events are compressed once.
    tail = gzip.compress(b'"traceEvents": ' + events + b"}", 6)
    folder.mkdir()
    for rank in range(ranks):
        offset = int(document.get("baseTimeNanoseconds", 0)) + (rank // 8) * CLOCK_OFFSET_NS
        header = document | {
            "baseTimeNanoseconds": offset,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
            "hostName": f"node{rank // 8}",
        }
        head = json.dumps(header).encode()[:-1] + b", "
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(head) + tail)


def measure(folder: Path, ranks: int, arguments: list[str]) -> Run:
    """One run of the command over the folder."""
    command = [sys.executable, "-m", "recompute_scan", "analyze", str(folder), "--format", "json"]
    peaks: dict[int, float] = {}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*command, *arguments], stdout=output)
        while process.poll() is None:
            for pid in (process.pid, *children(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0), peak_mb(pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        output.seek(0)
        result = json.load(output)
    found = {row["rank"] for row in result["ranks"]}
    assert process.returncode == 0
    assert found == set(range(ranks)), f"{ranks - len(found)} of {ranks} ranks are missing"
    return Run(seconds, peaks[process.pid], sum(peaks.values()))


def children(pid: int) -> list[int]:
    """The processes below one, at any depth."""
    try:
        text = "".join(p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    return [below for each in map(int, text.split()) for below in (each, *children(each))]


def peak_mb(pid: int) -> float:
    """The most memory that a living process has had; 0 for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) / 1000 if found else 0.0


if __name__ == "__main__":
    sys.exit(main())
