"""Record every case on the ``rig``, and ask for the answer in the shapes that GPUs leave.

    python benchmarks/shapes.py                     every case, a column per shape
    python benchmarks/shapes.py r_in_n --cost       and what the fix saves, beside the repaired twin
    python benchmarks/shapes.py --group core --from cpu
    python benchmarks/shapes.py --shapes kernels launches
    python benchmarks/shapes.py --evidence annotated   as `run` records, with checkpoints marked
    python benchmarks/shapes.py --keep FOLDER       recordings stay there, and are read from there
    python benchmarks/shapes.py --write FOLDER      only write the traces

The rig is a device of torch's own kind without a device (``tests/cases/device.py``): autograd runs
its backward pass on a thread of its own. To its recordings kernels are added
(``tests/cases/shaped.py``). What cannot run there is recorded on the CPU, and its backward pass is
moved to another thread (``tests/cases/moved.py``); with ``--from cpu`` that is done to all.

The truth is counted by the model while it is recorded. A dot is the truth, ``?`` is `inconclusive`,
and anything else is what was said instead. Below the table: how many of each, how many doubled
cases got a cost, and why the rest is `inconclusive`. Beside `make accuracy`'s groups there are two
of models without attention (``tests/cases/attention_free.py``), the second of which was made and
labelled first, and looked at last.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import EVIDENCE, HIDDEN
from benchmarks.accuracy import GROUPS as RECORDED
from tests.cases import device
from tests.cases.attention_free import SEEN, UNSEEN
from tests.cases.case import Case, record
from tests.cases.compiled import COMPILED
from tests.cases.distributed import DISTRIBUTED
from tests.cases.kernel_names import Event
from tests.cases.marked import annotating
from tests.cases.moved import moved
from tests.cases.repaired import SUFFIX, repaired
from tests.cases.retimed import retimed
from tests.cases.shaped import SHAPES, Shape, Shaped, as_bytes, shaped
from tests.cases.truth import Truth, read_truth, write_truth
from tests.sources.nsys_builder import from_trace
from tests.trace.kineto_reading import parse

from recompute_scan.analysis.answer import result_of
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.result import Result
from recompute_scan.trace.nsys.export import load_nsys

GROUPS = {**RECORDED, "attention-free": SEEN, "unseen": UNSEEN}
# Collectives and compilers know the CPU alone.
_NOT_ON_RIG = frozenset(case.name for case in (*DISTRIBUTED, *COMPILED)) | device.UNABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the status is 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help="cases; all by default")
    parser.add_argument("--group", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--evidence", choices=EVIDENCE, default=EVIDENCE[0])
    parser.add_argument("--from", dest="source", choices=(device.NAME, "cpu"), default=device.NAME)
    parser.add_argument("--cost", action="store_true", help="what the fix saves, for doubled ones")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="recordings, by case")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write traces, ask nothing")
    options = parser.parse_args(arguments)
    device.install(launches=True)
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    chosen = {
        case.name: case
        for group in options.group
        for case in GROUPS[group]
        if not options.names or case.name in options.names
    }
    made = Recordings(options.source == "cpu", options.keep, options.evidence)
    if options.write is not None:
        write_traces(list(chosen.values()), shapes, made, options.write)
        return 0
    wrong = print_table(list(chosen.values()), shapes, made)
    if options.cost:
        print_costs(list(chosen.values()), shapes, made)
    return int(wrong)


@dataclass(frozen=True)
class Recordings:
    """Where recordings come from.

    Attributes:
        on_cpu: Whether all are recorded on the CPU.
        keep: Where they stay, and are looked for first.
        evidence: Whether checkpoints are marked.
    """

    on_cpu: bool = False
    keep: Path | None = None
    evidence: str = EVIDENCE[0]

    def of(self, case: Case) -> tuple[Truth, Event]:
        """The case's truth and its recording, with its launches."""
        if self.keep is None:
            with tempfile.TemporaryDirectory() as folder:
                return self._in(Path(folder), case)
        self.keep.mkdir(parents=True, exist_ok=True)
        return self._in(self.keep, case)

    def _in(self, folder: Path, case: Case) -> tuple[Truth, Event]:
        by_cpu = self.on_cpu or case.name.removesuffix(SUFFIX) in _NOT_ON_RIG
        marked = self.evidence == "annotated"
        parts = (case.name, *["cpu"] * by_cpu, *["annotated"] * marked)
        trace = folder / f"{'-'.join(parts)}.json.gz"
        told = trace.with_suffix(".truth")
        if not told.exists():
            with annotating() if marked else contextlib.nullcontext():
                truth = record(case, trace, "cpu" if by_cpu else device.NAME)
            write_truth(told, truth)
        found: Event = json.loads(gzip.decompress(trace.read_bytes()))
        return read_truth(told), moved(found) if by_cpu else found


def write_traces(
    cases: Sequence[Case], shapes: Sequence[Shape], made: Recordings, folder: Path
) -> None:
    """Write each case in each shape, as the first rank's Kineto JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        _, recording = made.of(case)
        for shape in shapes:
            path = folder / f"{case.name}-{shape.name}.json"
            path.write_bytes(as_bytes(shaped(recording, shape)))


def print_table(cases: Sequence[Case], shapes: Sequence[Shape], made: Recordings) -> bool:
    """Print a line per case, and what was counted; whether an answer is wrong."""
    said: Counter[tuple[str, str]] = Counter()
    why: Counter[tuple[str, str]] = Counter()
    priced: Counter[tuple[str, bool]] = Counter()
    print(f"{'case':34} {'truth':12} " + " ".join(f"{shape.name:>16}" for shape in shapes))
    for case in cases:
        truth, recording = made.of(case)
        row = []
        for shape in shapes:
            result = answer(recording, shape)
            how = judge(truth, result)
            said[shape.name, how] += 1
            row.append("." if how == "right" else "?" if how == "inconclusive" else told(result))
            if how == "inconclusive":
                why[result.reason or "", shape.name] += 1
            if truth.verdict == "doubled":
                priced[shape.name, result.cost is not None and result.verdict == "doubled"] += 1
        print(f"{case.name:34} {_expected(truth):12} " + " ".join(f"{one:>16}" for one in row),
              flush=True)  # fmt: skip
    for how in ("right", "inconclusive", "wrong"):
        print(f"{how:47} " + " ".join(f"{said[shape.name, how]:16}" for shape in shapes))
    for name, which in (("doubled, with a cost", True), ("doubled, without", False)):
        print(f"{name:47} " + " ".join(f"{priced[shape.name, which]:16}" for shape in shapes))
    for (reason, name), number in sorted(why.items()):
        print(f"inconclusive, {name}: {number}: {reason}")
    return any(how == "wrong" and number for (_, how), number in said.items())


def print_costs(cases: Sequence[Case], shapes: Sequence[Shape], made: Recordings) -> None:
    """Print what the fix is predicted to save, beside the repaired case in the same shape.

    Where early stop may be switched off and the answer gives a second figure for that, it stands in
    the line, too.

    The host takes the same time for the same thing in both (``tests/cases/retimed.py``). Where it
    is the limit nothing is compared: what checkpoints' hooks take is not in these times.
    """
    shapes = [shape for shape in shapes if shape.name != "launch-bound"]
    every = {case.name: case for group in GROUPS.values() for case in group}
    print(f"\n{'case':34} {'shape':18} {'step':>8} {'predicted':>9} {'twin':>8} {'of step':>8} "
          f"{'of saving':>9}")  # fmt: skip
    off: dict[str, list[tuple[float, float, float, bool]]] = {each.name: [] for each in shapes}
    twins = [(case, repaired(case, every)) for case in cases if case.verdict == "doubled"]
    for case, twin in twins:
        if twin is None:
            continue
        recording, after = (retimed(made.of(one)[1]) for one in (case, twin))
        for shape in shapes:
            result = answer(recording, shape)
            cost = result.cost
            if cost is None or result.verdict != "doubled":
                print(f"{case.name:34} {shape.name:18} {'-':>8} {'-':>9}")
                continue
            before, then = shaped(recording, shape), shaped(after, shape)
            saved, step = (before.step_us - then.step_us) / 1000, cost.step_ms
            more = cost.step_ms - cost.predicted_step_ms - saved
            low, high = cost.predicted_low_ms, cost.predicted_high_ms
            held = low <= step - saved <= high
            late = more
            if cost.predicted_late_ms is not None:
                late = cost.step_ms - cost.predicted_late_ms - saved
            best = min(abs(more), abs(late)) / saved
            off[shape.name].append((abs(more) / step, abs(more) / saved, best, held))
            second = f"  early stop off: {100 * late / saved:+.1f}%" if late != more else ""
            if kernels_of(then) - kernels_of(before):
                second += "  no repair: it runs other kernels"
            print(
                f"{case.name:34} {shape.name:18} {step:8.1f} {cost.predicted_step_ms:9.1f} "
                f"{step - saved:8.1f} {-100 * more / step:+7.1f}% {100 * more / saved:+8.1f}%"
                f"{second}{'' if held else '  out of range'}",
                flush=True,
            )
    number = sum(twin is not None for _, twin in twins)
    print(f"\n{'cost':18} {'cases':>6} {'given':>6} {'within 5 %':>11} {'10 %':>6} of the saving "
          f"{'5 % by either':>14} {'in range':>9}; most off, of the step")  # fmt: skip
    for name, found in off.items():
        near = [sum(saving <= most for _, saving, _, _ in found) for most in (0.05, 0.1)]
        either = sum(best <= 0.05 for _, _, best, _ in found)
        inside = sum(held for *_, held in found)
        most = 100 * max((step for step, *_ in found), default=0.0)
        print(f"{name:18} {number:6} {len(found):6} {near[0]:11} {near[1]:6} {either:28} "
              f"{inside:9}; {most:6.1f}%")  # fmt: skip


def answer(recording: Event, shape: Shape) -> Result:
    """What the tool says of the recording in that shape."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shape.ranks > 1:
            for rank in range(shape.ranks):
                (folder / f"rank{rank}.json").write_bytes(as_bytes(shaped(recording, shape, rank)))
            return analyse([folder])
        made = shaped(recording, shape)
        trace = parse(as_bytes(made), shape.name)
        if shape.written == "nsight":
            trace = load_nsys(from_trace(trace, folder / "report.sqlite", by_id=True))
        return result_of(trace)


def kernels_of(made: Shaped) -> Counter[tuple[str, float]]:
    """How often each kernel of its own name and time runs."""
    events = made.document["traceEvents"]
    return Counter((one["name"], one["dur"]) for one in events if one.get("cat") == "kernel")


def judge(truth: Truth, result: Result) -> str:
    """``right``, ``inconclusive`` or ``wrong``."""
    if result.verdict == "inconclusive":
        hidden = truth.name in HIDDEN and "compiled" in (result.reason or "")
        return "right" if hidden else "inconclusive"
    same = truth.verdict in (None, result.verdict)
    right = same and result.recompute_per_backward == highest(truth)
    if len(result.ranks) > 1:
        right = right and {rank.verdict for rank in result.ranks} == {result.verdict}
    return "right" if right else "wrong"


def highest(truth: Truth) -> float:
    """Highest multiplicity of any part."""
    return max(max(layer) for layer in truth.multiplicity())


def told(result: Result) -> str:
    """The verdict with its number."""
    return f"{result.verdict} {result.recompute_per_backward:g}"


def _expected(truth: Truth) -> str:
    return f"{truth.verdict or 'open'} {highest(truth):g}"


if __name__ == "__main__":
    sys.exit(main())
