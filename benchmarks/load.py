"""Time and memory of reading a trace: ours, Holistic Trace Analysis, plain orjson, the limits.

Traces are recorded once and stay in a cache folder; from 2,000 MB on they are made longer out of
one of 300 MB. Each measurement is a process of its own (``_load_one.py``); all ways take turns; the
table shows medians. Memory is the peak of the process, that of its children added. HTA's and
orjson's rows need an interpreter that has them (``pip install traceinsight ijson orjson``).

  python -m benchmarks load --sizes 50,300,1500 --hta-python PATH
  python -m benchmarks load --sizes 10000 --kinds stacks --ways analyze --runs 1

The status is 1 where one of our own measurements failed.
"""

import datetime
import gzip
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks._frame import HERE, Table, benchmark, fresh, in_turn, some, told
from benchmarks._machine import machine

CACHE = Path.home() / ".cache" / "recompute-scan-bench"
KINDS = {"stacks": True, "plain": False}
# A trace of more MB is made out of one of so many.
_LONG_MB, _SHORT_MB = 2000, 300
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
OURS = [way for way in LABELS if not way.startswith(("hta-", "orjson"))]
OUR_PACKAGES = ("recompute-scan", "msgspec", "numpy", "isal", "torch")
THEIR_PACKAGES = ("traceinsight", "HolisticTraceAnalysis", "pandas", "ijson", "orjson")


@dataclass(frozen=True)
class Run:
    """One measurement.

    Attributes:
        seconds: The load alone.
        cpu: CPU seconds of the same.
        whole: Seconds of the whole process, interpreter and imports included.
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


@benchmark
@click.option("--sizes", default="50,300,1500", help="MB, with commas between them.")
@some("--kinds", KINDS, text="With Python frames, or without.")
@some("--ways", LABELS, text="What is measured.")
@click.option("--gzip", "packed", is_flag=True, help="Measure compressed traces too.")
@click.option("--runs", default=3)
@click.option("--their-runs", type=int, help="Of HTA and orjson; as many as ours by default.")
@click.option("--timeout", default=1800.0, help="Seconds.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE)
@click.option("--hta-python", help="An interpreter with HTA and orjson.")
def main(
    sizes: str,
    kinds: Sequence[str],
    ways: Sequence[str],
    packed: bool,
    runs: int,
    their_runs: int | None,
    timeout: float,
    cache: Path,
    hta_python: str | None,
) -> int:
    print(f"* {datetime.date.today().isoformat()} · {machine(*OUR_PACKAGES)}")
    print(f"* {_versions_elsewhere(hta_python)}")
    print(f"* Medians of {runs} runs in turn ({their_runs or runs} of HTA and orjson); MB = 10^6 B")
    failed = False
    for size in map(int, sizes.split(",")):
        for kind in kinds:
            for path in _made(cache, kind, size, packed):
                here = {way: sys.executable for way in ways if way in OURS}
                there = {way: hta_python for way in ways if way not in OURS and hta_python}
                if path.suffix != ".gz":
                    here.pop("inflating", None)
                if kind != "stacks":
                    here.pop("ours-with-frames", None)
                often = {**dict.fromkeys(here, runs), **dict.fromkeys(there, their_runs or runs)}
                found, failures = _measure(path, {**here, **there}, often, timeout)
                _show(path, kind, found, failures)
                failed |= any(way in failures for way in ("ours", "analyze"))
    return 1 if failed else 0


def _made(cache: Path, kind: str, size: int, packed: bool) -> Iterable[Path]:
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{kind}-{size}.json"
    partial = path.with_suffix(".partial")
    if not path.exists():
        how = ["stacks"] if KINDS[kind] else []
        if size > _LONG_MB:
            how = [str(short) for short in _made(cache, kind, _SHORT_MB, False)]
        _say(f"making {path}")
        ran = fresh([sys.executable, "-m", "benchmarks._traces", partial, str(size), *how])
        if ran.status:
            raise click.ClickException(ran.output[-2000:])
        partial.rename(path)
    yield path
    if packed:
        compressed = path.with_suffix(".json.gz")
        if not compressed.exists():
            _say(f"compressing {path}")
            with path.open("rb") as source, gzip.open(partial, "wb", 6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            partial.rename(compressed)
        yield compressed


def _measure(
    path: Path, ways: Mapping[str, str], often: Mapping[str, int], timeout: float
) -> tuple[dict[str, Run], dict[str, str]]:
    """Medians of each way, and why there are none of others."""
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    failures: dict[str, str] = {}
    for way in in_turn(list(ways), max(often.values(), default=0)):
        if way in failures or len(runs[way]) >= often[way]:
            continue
        _say(f"{path.name}, run {len(runs[way]) + 1} of {often[way]}: {LABELS[way]}")
        command: list[str | Path] = [ways[way], HERE / "_load_one.py", way, path]
        began = time.perf_counter()
        try:
            found = told(command, timeout_s=timeout)
            runs[way].append(Run(whole=time.perf_counter() - began, **found))
        except subprocess.TimeoutExpired:
            failures[way] = f"gave up after {timeout:g} s"
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            failures[way] = f"status {error.returncode}: {last[:100]}"
        except OSError as error:
            failures[way] = str(error)
    return {way: _median(found) for way, found in runs.items() if found}, failures


def _median(runs: Sequence[Run]) -> Run:
    seconds, cpu, whole, mb, imported = (
        statistics.median(getattr(run, name) for run in runs)
        for name in ("seconds", "cpu", "whole", "mb", "imported_mb")
    )
    return Run(seconds, cpu, whole, mb, imported, runs[0].events)


def _show(path: Path, kind: str, found: Mapping[str, Run], failures: Mapping[str, str]) -> None:
    size = (path.with_suffix("") if path.suffix == ".gz" else path).stat().st_size / 1e6
    packed = f", {path.stat().st_size / 1e6:,.0f} MB compressed" if path.suffix == ".gz" else ""
    print(f"\n### {path.name}: {size:,.0f} MB{packed}, {kind}\n")
    columns = {"": "<", "load, s": ">.2f", "CPU, s": ">.2f", "MB/s": ">,.0f"}
    columns |= {"whole process, s": ">.2f", "peak, MB": ">,.0f", "of it before": ">,.0f"}
    table = Table({**columns, "events": ">,"}, markdown=True)
    for way, label in LABELS.items():
        if way in failures:
            table.row(label, failures[way], *[""] * 6)
        elif way in found:
            run = found[way]
            times = (run.seconds, run.cpu, size / run.seconds, run.whole)
            table.row(label, *times, run.mb, run.imported_mb, run.events or "")
    print("\n" + "; ".join(_ratios(found)))


def _ratios(found: Mapping[str, Run]) -> Iterable[str]:
    theirs = {way: run for way, run in found.items() if way.startswith("hta-")}
    ours, whole, default = (found.get(way) for way in ("ours", "analyze", "hta-json"))
    if ours and default:
        yield f"File to columns, HTA's default reader takes {_times(default, ours)}"
    if (all_events := found.get("ours-with-frames")) and default:
        taken = default.seconds / all_events.seconds
        yield f"{taken:.1f} times as long as ours with the Python frames that it keeps"
    if ours and theirs:
        for which, of in (("fastest", "seconds"), ("leanest", "mb")):
            best = min(theirs, key=lambda way: float(getattr(theirs[way], of)))
            name = best.removeprefix("hta-")
            yield f"its {which} reader here, {name}, {_times(theirs[best], ours)}"
    if ours and whole:
        yield (
            f"`analyze` takes {whole.whole / ours.whole:.2f} times as long as loading alone, each "
            "a whole process"
        )
    if whole and default:
        yield (
            f"for its load alone, HTA's default reader takes {default.seconds / whole.whole:.1f} "
            "times as long as the whole `analyze` process"
        )


def _times(theirs: Run, ours: Run) -> str:
    return (
        f"{theirs.seconds / ours.seconds:.1f} times as long ({theirs.cpu / ours.cpu:.1f} in CPU "
        f"seconds) and {theirs.mb / ours.mb:.1f} times the memory "
        f"({(theirs.mb - theirs.imported_mb) / (ours.mb - ours.imported_mb):.1f} of what the load "
        "adds)"
    )


def _versions_elsewhere(interpreter: str | None) -> str:
    if not interpreter:
        return "HTA and orjson were not measured: give --hta-python"
    code = "import sys; sys.path.insert(0, sys.argv[1]); import _machine as m; print(m.machine("
    ran = fresh([interpreter, "-c", f"{code}*sys.argv[2:]))", HERE, *THEIR_PACKAGES])
    return f"Theirs: {ran.output.strip()}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
