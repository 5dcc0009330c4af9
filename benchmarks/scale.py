"""Time and memory of analyzing many ranks: against their number, by workers here and by Dask.

The ranks are one real trace again, each with its own rank, host and clock in the header. Each
measurement is a process of its own, `recompute-scan analyze FOLDER`; it fails unless every rank's
row is in the result. Memory is the peak by the kernel's count, of all processes the sum of peaks.

  python -m benchmarks scale --ranks 8,32,128,512
"""

import gzip
import json
import subprocess
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import click
from tests.clusters import local_cluster

from benchmarks._frame import TOOL, TRACES, Table, benchmark, surroundings
from benchmarks._machine import children, machine, peak_mb

TRACE = TRACES / "public" / "mi300x-resnet-checkpointed.json.gz"
# Nanoseconds by which the clocks of two hosts differ here.
CLOCK_OFFSET_NS = 7_000_000_123


class Run(NamedTuple):
    """One measurement: seconds, and peaks in MB of the head process and of all together."""

    seconds: float
    head_mb: float
    all_mb: float


@benchmark
@click.option("--trace", type=click.Path(path_type=Path, exists=True), default=TRACE)
@click.option("--ranks", default="8,32,128,512", help="Numbers of ranks.")
@click.option("--workers", default="1,2", help="Numbers of workers.")
@click.option("--dask/--no-dask", default=True, help="With a LocalCluster too.")
def main(trace: Path, ranks: str, workers: str, dask: bool) -> None:
    print(machine("recompute-scan", "numpy", "distributed"))
    print(f"trace: {trace.name}, {trace.stat().st_size / 1e6:.1f} MB compressed\n")
    columns = {"ranks": ">", "workers": "<", "s": ">.1f", "ms a rank": ">.0f"}
    memory = {"head, peak MB": ">.0f", "all processes, MB": ">.0f"}
    table = Table({**columns, **memory}, markdown=True)
    with (
        tempfile.TemporaryDirectory() as name,
        local_cluster() if dask else nullcontext() as address,
    ):
        for number in map(int, ranks.split(",")):
            folder = Path(name) / str(number)
            make_ranks(trace, number, folder)
            ways = {f"{some} here": ["--workers", some] for some in workers.split(",")}
            if address:
                ways["2 of a LocalCluster"] = ["--dask", address]
            for way, arguments in ways.items():
                run = measure(folder, number, arguments)
                # A cluster's workers are not children of the head, and live on.
                whole = None if "--dask" in arguments else run.all_mb
                each = 1000 * run.seconds / number
                table.row(number, way, run.seconds, each, run.head_mb, whole)


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
    command = [*TOOL, "analyze", str(folder), "--format", "json", *arguments]
    peaks: dict[int, float] = {}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, env=surroundings())
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
