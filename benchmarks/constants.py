"""What every tuned number of the analysis decides, on traces of many machines and versions.

Each number is halved and doubled, alone, and every trace of ``traces/`` is analyzed again. The
table says in how many of them the answer changes (verdict, count, confidence), in how many the
predicted step does, and by how much at most, and in how many anything in the result does. A number
that changes nothing on any of them is one to do without, or one that
``benchmarks/results/constants.md`` gives a reason for.

  python -m benchmarks constants cost.predict
  python -m benchmarks constants attention --traces FOLDER   as `shapes --write` leaves them
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from benchmarks._frame import ROOT, TRACES, Table, benchmark, folder_option, wanted, words
from recompute_scan.analysis import loading, pipeline
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import ScanError
from recompute_scan.recompute import facts
from recompute_scan.result import to_json

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
    folders = [path for path in sorted(TRACES.iterdir()) if any(path.glob("trace-*"))]
    single = [
        path
        for folder in ("public", "versions")
        for path in sorted((TRACES / folder).rglob("*.json.gz"))
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


@benchmark
@words()
@folder_option("--traces", "given", text="Other traces than the repository's.")
@click.option("--show", is_flag=True, help="Only list the numbers.")
def main(words: Sequence[str], given: Path | None, show: bool) -> None:
    chosen = [one for one in numbers() if wanted(one[0], words)]
    if show:
        for module, name, value in chosen:
            print(f"{module}.{name} = {value}")
        return
    every = [[path] for path in sorted(given.iterdir())] if given else traces()
    remember(studied=not any(".recompute." in module for module, _, _ in chosen))
    before = answers(every)
    print(f"{len(chosen)} numbers, {len(every)} traces; each halved and doubled\n")
    columns = {"number": "<58", "value": ">8g", "answers": ">8", "predictions": ">12"}
    table = Table({**columns, "most": ">7.1%", "anything": ">9"})
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
        most = max(moved.values(), default=None)
        label = f"{module.removeprefix('recompute_scan.')}.{name}"
        table.row(label, value, len(other), len(moved), most, len(anything))
