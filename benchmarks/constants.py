"""What every tuned number of the analysis decides, on traces of many machines and versions.

    python benchmarks/constants.py
    python benchmarks/constants.py --only recompute_scan.cost.predict
    python benchmarks/constants.py --only attention --traces FOLDER   as shapes.py --write leaves

Each number is halved and doubled, alone, and every trace of ``traces/`` is analysed again: CPU and
GPU, torch 1.8 to 2.14, eight machines. The table says in how many of them the answer changes
(verdict, count, confidence), in how many the predicted step does, and by how much at most, and in
how many anything in the result does. A number that changes nothing on any of them is one to do
without, or one that ``benchmarks/results/constants.md`` gives a reason for.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from recompute_scan.analysis import loading, pipeline
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import ScanError
from recompute_scan.recompute import facts
from recompute_scan.result import to_json

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("recompute", "cost", "analysis")
# Bounds on work and on what is shown, units, formulas' own numbers: not tuned.
NOT_TUNED = re.compile(
    r"_NS_PER_MS|_MOST|_MOST_.*|MOST_.*|_LOOKED_AT|_HEAD|CHUNK|_PIECE|_LONGEST.*|_SHOWN.*|_SCALE"
    r"|_JOINED|_FINISHED|_DEEPEST|_TIMEOUT.*|.*_TIMEOUT_S|.*_BYTES|_MEDIAN_95|_DEVIATION|_MISSING"
    r"|LATEST_US|EARLIEST_US|NO_.*|UNKNOWN|.*_BIT|_LOW_\d\d|_FIRST_EVENT|_TIME_LIMIT_S|_DENSE"
    # Rounds and records looked at, minus infinity, ties of a solver, points of a drawn curve.
    r"|_CORRECTIONS|_RECORDS|_LEVELS|_NEVER|_PREFERENCE|_CURVE_POINTS"
    # Choices by number.
    r"|KEEP|RECOMPUTE|SELECTIVE|OFFLOAD|PART"
    # A file that is not read, what decides on speed alone, a shell's status.
    r"|_LARGEST|_HEAD_LINES|_BYTES_A_WORKER|_INFLATES|_FEW_FRAMES|INTERRUPTED"
)


def numbers() -> Iterator[tuple[str, str, Any]]:
    """Module, name and value of every number at the top of a module of the analysis."""
    for room in ROOMS:
        for path in sorted((ROOT / "src" / "recompute_scan" / room).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
            loaded = importlib.import_module(module)
            for line in path.read_text(encoding="utf-8").splitlines():
                found = re.match(r"(_?[A-Z][A-Z_0-9]*)(?:, _?[A-Z_0-9]+)* = (?=[-0-9.]+)", line)
                for name in re.findall(r"_?[A-Z][A-Z_0-9]*", found[0]) if found else ():
                    value = vars(loaded).get(name)
                    tuned = isinstance(value, (int, float)) and not isinstance(value, bool)
                    if tuned and value and not NOT_TUNED.fullmatch(name):
                        yield module, name, value


def traces() -> list[list[Path]]:
    """Every trace of the repository, a run's ranks together."""
    folders = [path for path in sorted((ROOT / "traces").iterdir()) if any(path.glob("trace-*"))]
    single = [
        path
        for folder in ("public", "versions")
        for path in sorted((ROOT / "traces" / folder).rglob("*.json.gz"))
    ]
    return [[path] for path in (*folders, *single)]


def remember(*, studied: bool) -> None:
    """Each trace is loaded once, and with ``studied`` also studied: what else is the analysis' own,
    and numbers of ``cost/`` and ``analysis/`` come after that.
    """
    loaded: dict[str, Any] = {}
    known: dict[int, Any] = {}

    def load_one(address: Any, *rest: Any) -> Any:
        if str(address) not in loaded:
            loaded[str(address)] = loading.load_one(address, *rest)
        return loaded[str(address)]

    def study(trace: Any, *rest: Any) -> Any:
        if id(trace) not in known:
            known[id(trace)] = (trace, facts.study(trace, *rest))
        return known[id(trace)][1]

    vars(pipeline).update(load_one=load_one, study=study if studied else facts.study)


def answers(all_traces: Sequence[list[Path]]) -> list[tuple[Any, float | None, str]]:
    """Of each trace what is answered, the predicted step in ms, and the whole result."""
    found: list[tuple[Any, float | None, str]] = []
    for paths in all_traces:
        try:
            result = analyse(paths)
        except ScanError as error:
            found.append((str(error), None, ""))
            continue
        counts = [region.recompute_runs_per_backward for region in result.regions]
        said = (result.verdict, result.recompute_per_backward, result.confidence, counts)
        step = result.cost.predicted_step_ms if result.cost else None
        found.append((msgspec.json.encode(said), step, to_json(result)))
    return found


def main() -> None:
    """Print the table, a row for each number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="of modules with it in the name")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="other traces than these")
    parser.add_argument("--show", action="store_true", help="only list the numbers")
    options = parser.parse_args()
    chosen = [one for one in numbers() if options.only in one[0]]
    if options.show:
        for module, name, value in chosen:
            print(f"{module}.{name} = {value}")
        return
    every = [[path] for path in sorted(options.traces.iterdir())] if options.traces else traces()
    remember(studied=not any(".recompute." in module for module, _, _ in chosen))
    before = answers(every)
    print(f"{len(chosen)} numbers, {len(every)} traces; each halved and doubled\n")
    head = f"{'number':58} {'value':>8} {'answers':>8} {'predictions':>12} {'most':>7}"
    print(f"{head} {'anything':>9}", flush=True)
    for module, name, value in chosen:
        loaded = importlib.import_module(module)
        other: set[int] = set()
        moved: dict[int, float] = {}
        anything: set[int] = set()
        for changed in (value / 2, value * 2):
            setattr(loaded, name, type(value)(changed) or value)
            for at, (old, new) in enumerate(zip(before, answers(every), strict=True)):
                if old[0] != new[0]:
                    other.add(at)
                if old[2] != new[2]:
                    anything.add(at)
                if old[1] and new[1] and abs(new[1] / old[1] - 1) > 1e-4:
                    moved[at] = max(moved.get(at, 0.0), abs(new[1] / old[1] - 1))
            setattr(loaded, name, value)
        most = f"{100 * max(moved.values()):.1f} %" if moved else ""
        label = f"{module.removeprefix('recompute_scan.')}.{name}"
        counted = f"{len(other):>8} {len(moved):>12} {most:>7} {len(anything):>9}"
        print(f"{label:58} {value:>8g} {counted}", flush=True)


if __name__ == "__main__":
    main()
