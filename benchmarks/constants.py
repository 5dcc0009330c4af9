"""What every tuned number of the analysis decides, on traces of many machines and versions.

Each number is halved and doubled, alone, and every trace of ``traces/`` is analyzed again. The
table says in how many of them the answer changes (verdict, count, confidence), in how many the
predicted step does, and by how much at most, and in how many anything in the result does. A number
that changes nothing on any of them is one to do without, or one that
``benchmarks/results/constants.md`` gives a reason for.

  python -m benchmarks constants cost.predict
  python -m benchmarks constants attention --traces FOLDER   as `shapes --write` leaves them
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.tuned import numbers

from benchmarks._frame import TRACES, Table, benchmark, folder_option, wanted, words
from recompute_scan.analysis import inputs, pipeline
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import ScanError
from recompute_scan.recompute import study as facts
from recompute_scan.result import to_json


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
            loaded[str(address)] = inputs.load_one(address, *rest)
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
def main(words: Sequence[str], given: Path | None) -> None:
    chosen = [one for one in numbers() if wanted(one[0], words)]
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
