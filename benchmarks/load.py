"""Time and memory of reading traces: ours, Holistic Trace Analysis, plain orjson, the limits.

    python benchmarks/load.py --sizes 50 300 1500 --hta-python /path/to/venv/bin/python

Records its own traces once (torch is needed for that) and keeps them in a cache folder. Each
measurement is a process of its own; all are run in turn, over and over, so that a slow minute of
the machine hits all alike; the table shows medians. Memory is the peak of the process, that of
its children added. HTA's and orjson's rows need an interpreter that has them, which may be
another: ``pip install traceinsight ijson orjson``.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import processor, versions

HERE = Path(__file__).resolve().parent
CACHE = Path.home() / ".cache" / "recompute-scan-bench"
KINDS = {"stacks": True, "plain": False}
OURS, WHOLE, HTA_DEFAULT = "ours", "analyze", "hta-json"
HTA_READERS = ("json", "ijson", "ijson_batched", "ijson_batch_and_compress")
LABELS = {
    "ours": "recompute_scan.trace.load",
    "ours-with-frames": "the same, Python frames kept",
    "analyze": "recompute-scan analyze --format json",
    "hta-json": "HTA json (its default)",
    **{f"hta-{reader}": f"HTA {reader}" for reader in HTA_READERS[1:]},
    "orjson": "orjson, to dictionaries",
    "reading": "limit: read the file",
    "inflating": "limit: inflate with isal",
    "skipping": "limit: msgspec, everything skipped",
}
OUR_PACKAGES = ("recompute-scan", "msgspec", "numpy", "isal", "torch")
THEIR_PACKAGES = ("traceinsight", "HolisticTraceAnalysis", "pandas", "ijson", "orjson")


@dataclass(frozen=True)
class Run:
    """One measurement.

    Attributes:
        seconds: The load alone.
        cpu: CPU seconds of the same.
        whole: The whole process, interpreter and imports included.
        mb: Peak memory, children's added.
        imported_mb: What of it was there before the load: the interpreter and imports.
        events: Events that came out, where that means something.
    """

    seconds: float
    cpu: float
    whole: float
    mb: float
    imported_mb: float
    events: int | None


@dataclass(frozen=True)
class Row:
    """Medians of all runs of one way, or why there are none."""

    way: str
    run: Run | None
    failure: str = ""


def main() -> int:
    """Measure and print; the status is 1 when one of our own measurements failed."""
    options = _options()
    lines = [*_about(options), ""]
    print("\n".join(lines), flush=True)
    failed = False
    for size in options.sizes:
        for kind in options.kinds:
            for path in _traces(options, kind, size):
                rows = _measure(path, _ways(options, path), options)
                table = _table(path, kind, rows)
                print("\n".join(table), flush=True)
                lines += table
                failed |= any(row.run is None and row.way in (OURS, WHOLE) for row in rows)
    if options.output:
        options.output.write_text("\n".join(lines))
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[50, 300, 1500], metavar="MB")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--gzip", action="store_true", help="measure compressed traces too")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--their-runs", type=int, metavar="N", help="runs of HTA and orjson [as many as ours]"
    )
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder [{CACHE}]")
    parser.add_argument("--hta-python", metavar="PATH", help="interpreter with HTA and orjson")
    parser.add_argument("--hta-readers", nargs="*", choices=HTA_READERS, default=HTA_READERS)
    parser.add_argument("--output", type=Path, help="write the Markdown here too")
    return parser.parse_args()


def _traces(options: argparse.Namespace, kind: str, size: int) -> Iterable[Path]:
    options.cache.mkdir(parents=True, exist_ok=True)
    path = options.cache / f"{kind}-{size}.json"
    if not path.exists():
        _say(f"recording {path}")
        partial = path.with_suffix(".partial")
        command = [sys.executable, str(HERE / "training_trace.py"), str(partial)]
        command += ["--megabytes", str(size)] + (["--stacks"] if KINDS[kind] else [])
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        partial.rename(path)
    yield path
    if options.gzip:
        compressed = path.with_suffix(".json.gz")
        if not compressed.exists():
            _say(f"compressing {path}")
            partial = path.with_suffix(".partial")
            with path.open("rb") as source, gzip.open(partial, "wb", 6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            partial.rename(compressed)
        yield compressed


def _ways(options: argparse.Namespace, path: Path) -> list[tuple[str, str]]:
    """Ways to measure, each with the interpreter that runs it."""
    compressed = path.suffix == ".gz"
    mine = [OURS, "ours-with-frames", WHOLE, "reading", "skipping"]
    mine += ["inflating"] if compressed else []
    if not path.name.startswith("stacks"):
        mine.remove("ours-with-frames")
    ways = [(way, sys.executable) for way in mine]
    if options.hta_python:
        theirs = [f"hta-{reader}" for reader in options.hta_readers] + ["orjson"]
        ways += [(way, options.hta_python) for way in theirs]
    return sorted(ways, key=lambda way: list(LABELS).index(way[0]))


def _measure(path: Path, ways: Sequence[tuple[str, str]], options: argparse.Namespace) -> list[Row]:
    runs: dict[str, list[Run]] = {way: [] for way, _ in ways}
    failures: dict[str, str] = {}
    _say(f"warming up on {path.name}")
    _one(WHOLE, path, sys.executable, options.timeout)
    for turn in range(options.runs):
        for way, interpreter in ways:
            theirs = way.startswith("hta-") or way == "orjson"
            if way in failures or (theirs and turn >= (options.their_runs or options.runs)):
                continue
            _say(f"{path.name}, turn {turn + 1} of {options.runs}: {LABELS[way]}")
            result = _one(way, path, interpreter, options.timeout)
            if isinstance(result, str):
                failures[way] = result
            else:
                runs[way].append(result)
    return [
        Row(way, None, failures[way]) if way in failures else Row(way, _median(runs[way]))
        for way, _ in ways
    ]


def _one(way: str, path: Path, interpreter: str, timeout: float) -> Run | str:
    """One measurement in a process of its own, or why it failed."""
    # As people run it: without bytecode on disk, every start would compile the package anew.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [interpreter, str(HERE / "load_one.py"), way, str(path)],
            env=environment,
            capture_output=True,
            check=False,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return f"gave up after {timeout:g} s"
    except OSError as error:
        return str(error)
    whole = time.perf_counter() - began
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"status {done.returncode}: {last[:100]}"
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return Run(told["seconds"], told["cpu"], whole, told["mb"], told["imported_mb"], told["events"])


def _median(runs: Sequence[Run]) -> Run:
    seconds, cpu, whole, mb, imported = (
        statistics.median(getattr(run, name) for run in runs)
        for name in ("seconds", "cpu", "whole", "mb", "imported_mb")
    )
    return Run(seconds, cpu, whole, mb, imported, runs[0].events)


def _table(path: Path, kind: str, rows: Sequence[Row]) -> list[str]:
    size = _plain_size(path) / 1e6
    packed = f", {path.stat().st_size / 1e6:,.0f} MB compressed" if path.suffix == ".gz" else ""
    lines = [
        f"### {path.name}: {size:,.0f} MB{packed}, {'with' if KINDS[kind] else 'without'} stacks",
        "",
        "| | load, s | CPU, s | MB/s | whole process, s | peak, MB | of it before | events |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        run = row.run
        if run is None:
            lines.append(f"| {LABELS[row.way]} | {row.failure} | | | | | | |")
            continue
        events = f"{run.events:,}" if run.events is not None else ""
        load, rate = f"{run.seconds:.2f}", f"{size / run.seconds:,.0f}"
        lines.append(
            f"| {LABELS[row.way]} | {load} | {run.cpu:.2f} | {rate} | {run.whole:.2f} "
            f"| {run.mb:,.0f} | {run.imported_mb:,.0f} | {events} |"
        )
    return [*lines, "", *_ratios(rows), ""]


def _ratios(rows: Sequence[Row]) -> list[str]:
    found = {row.way: row.run for row in rows if row.run is not None}
    theirs = {way: run for way, run in found.items() if way.startswith("hta-")}
    ours, whole, default = found.get(OURS), found.get(WHOLE), found.get(HTA_DEFAULT)
    lines = []
    if ours and default:
        lines.append(f"File to columns, HTA's default reader takes {_times(default, ours)}")
    if (all_events := found.get("ours-with-frames")) and default:
        taken = default.seconds / all_events.seconds
        lines.append(f"{taken:.1f} times as long as ours with the Python frames that it keeps")
    if ours and theirs:
        for which, of in (("fastest", "seconds"), ("leanest", "mb")):
            best = min(theirs, key=lambda way: float(getattr(theirs[way], of)))
            name = best.removeprefix("hta-")
            lines.append(f"its {which} reader here, {name}, {_times(theirs[best], ours)}")
    if ours and whole:
        lines.append(
            f"`analyze` takes {whole.whole / ours.whole:.2f} times as long as loading alone, each "
            "a whole process"
        )
    if whole and default:
        lines.append(
            f"for its load alone, HTA's default reader takes {default.seconds / whole.whole:.1f} "
            "times as long as the whole `analyze` process"
        )
    return ["; ".join(lines) + "."] if lines else []


def _times(theirs: Run, ours: Run) -> str:
    return (
        f"{theirs.seconds / ours.seconds:.1f} times as long ({theirs.cpu / ours.cpu:.1f} in CPU "
        f"seconds) and {theirs.mb / ours.mb:.1f} times the memory "
        f"({(theirs.mb - theirs.imported_mb) / (ours.mb - ours.imported_mb):.1f} of what the load "
        "adds)"
    )


def _plain_size(path: Path) -> int:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return plain.stat().st_size


def _about(options: argparse.Namespace) -> list[str]:
    lines = [
        f"{datetime.date.today().isoformat()} · {processor()}, {os.cpu_count()} cores · "
        f"{platform.system()} {platform.release()} · Python {platform.python_version()}",
        f"Ours: {versions(OUR_PACKAGES)}",
    ]
    if options.hta_python:
        lines.append(f"Theirs: {_versions_elsewhere(options.hta_python)}")
    else:
        lines.append("HTA and orjson were not measured: give --hta-python.")
    theirs = options.their_runs or options.runs
    lines.append(
        f"Medians of {options.runs} interleaved runs ({theirs} of HTA and orjson); MB = 10^6 "
        "bytes, uncompressed."
    )
    return [f"* {line}" for line in lines]


def _versions_elsewhere(interpreter: str) -> str:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import machine; "
        "print(machine.versions(sys.argv[2:]) + ', Python', sys.version.split()[0])"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", code, str(HERE), *THEIR_PACKAGES],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{interpreter} cannot be used ({error})"
    return done.stdout.strip()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
