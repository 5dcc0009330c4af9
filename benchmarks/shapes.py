"""Every case in the shapes that GPUs leave: the model's count beside the answer in each.

The cases are recorded on the rig, a device of torch's own kind without a device
(``tests/cases/device.py``): autograd runs its backward pass on a thread of its own. Kernels are
added to the recordings (``tests/cases/shaped.py``). What cannot run there is recorded on the CPU,
and its backward pass is moved to another thread (``tests/cases/moved.py``). A dot is the truth,
``?`` is `inconclusive`, and anything else is what was said instead. Beside the groups of `accuracy`
there are two of models without attention. By kernels alone a block that a hook or a function's own
design runs again cannot be told from a recompute: a wrong answer there is counted as `known`.

  python -m benchmarks shapes                       every case, a column a shape
  python -m benchmarks shapes r_in_n --cost         what the fix saves, beside the repaired twin
  python -m benchmarks shapes --group core --from cpu
  python -m benchmarks shapes --shapes kernels,launches

The status is 1 where an answer is wrong.
"""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from tests.cases import device
from tests.cases.attention_free import SEEN, UNSEEN
from tests.cases.case import Case, record
from tests.cases.compiled import COMPILED
from tests.cases.distributed import DISTRIBUTED
from tests.cases.groups import GROUPS as RECORDED
from tests.cases.groups import highest
from tests.cases.hooks import HOOKS
from tests.cases.kernel_names import Event
from tests.cases.moved import moved
from tests.cases.repaired import SUFFIX, repaired
from tests.cases.retimed import retimed
from tests.cases.shaped import SHAPES, Shape, Shaped, as_bytes, shaped
from tests.cases.truth import Truth, read_truth, write_truth
from tests.sources.nsys_builder import from_trace
from tests.trace.kineto_reading import parse

from benchmarks._frame import Table, benchmark, folder_option, kept_in, some, words
from benchmarks.accuracy import EVIDENCE, agrees, marked
from recompute_scan.analysis.pipeline import analyse, result_of
from recompute_scan.result import Result
from recompute_scan.trace.nsys import load_nsys

GROUPS = {**RECORDED, "attention-free": SEEN, "unseen": UNSEEN}
# Collectives and compilers know the CPU alone.
_NOT_ON_RIG = frozenset(case.name for case in (*DISTRIBUTED, *COMPILED)) | device.UNABLE


@benchmark
@words("names")
@some("--group", GROUPS, text="Groups of cases.")
@some("--shapes", [shape.name for shape in SHAPES], text="Shapes of traces.")
@click.option("--evidence", type=click.Choice(EVIDENCE), default=EVIDENCE[0])
@click.option("--from", "source", type=click.Choice([device.NAME, "cpu"]), default=device.NAME)
@click.option("--cost", is_flag=True, help="What the fix saves, for doubled ones.")
@folder_option("--keep", text="Where recordings stay, and are read from.")
@folder_option("--write", text="Only write the traces, here.")
def main(
    names: Sequence[str],
    group: Sequence[str],
    shapes: Sequence[str],
    evidence: str,
    source: str,
    cost: bool,
    keep: Path | None,
    write: Path | None,
) -> int:
    device.install(launches=True)
    asked = [shape for shape in SHAPES if shape.name in shapes]
    among = {case.name: case for name in group for case in GROUPS[name]}
    cases = [case for case in among.values() if not names or case.name in names]
    made = Recordings(source == "cpu", keep, evidence)
    if write is not None:
        write_traces(cases, asked, made, write)
        return 0
    wrong = print_table(cases, asked, made)
    if cost:
        print_costs(cases, asked, made)
    return int(wrong)


@dataclass(frozen=True)
class Recordings:
    """Where recordings come from: all from the CPU or not; the folder where they stay and are
    looked for first; whether checkpoints are marked.
    """

    on_cpu: bool = False
    keep: Path | None = None
    evidence: str = EVIDENCE[0]

    def of(self, case: Case) -> tuple[Truth, Event]:
        """The case's truth and its recording, with its launches."""
        with kept_in(self.keep) as folder:
            return self._in(folder, case)

    def _in(self, folder: Path, case: Case) -> tuple[Truth, Event]:
        by_cpu = self.on_cpu or case.name.removesuffix(SUFFIX) in _NOT_ON_RIG
        annotated = self.evidence == "annotated"
        parts = (case.name, *["cpu"] * by_cpu, *["annotated"] * annotated)
        trace = folder / f"{'-'.join(parts)}.json.gz"
        told = trace.with_suffix(".truth")
        if not told.exists():
            with marked(annotated):
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
    table = Table({"case": "<34", "truth": "<12", **{shape.name: ">16" for shape in shapes}})
    for case in cases:
        truth, recording = made.of(case)
        row = []
        for shape in shapes:
            result = answer(recording, shape)
            how = judge(truth, result)
            if how == "wrong" and not shape.tells_operators and (case.by_design or case in HOOKS):
                how = "known"
            said[shape.name, how] += 1
            words = {"right": ".", "inconclusive": "?"}
            row.append(words.get(how) or f"{result.verdict} {result.recompute_per_backward:g}")
            if how == "inconclusive":
                why[result.reason or "", shape.name] += 1
            if truth.verdict == "doubled":
                priced[shape.name, result.cost is not None and result.verdict == "doubled"] += 1
        table.row(case.name, f"{truth.verdict or 'open'} {highest(truth):g}", *row)
    counts: dict[str, list[int]] = {
        how: [said[shape.name, how] for shape in shapes]
        for how in ("right", "inconclusive", "known", "wrong")
    }
    for name, which in (("doubled, with a cost", True), ("doubled, without", False)):
        counts[name] = [priced[shape.name, which] for shape in shapes]
    for name, numbers in counts.items():
        table.row(name, "", *numbers)
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
    print()
    table = Table(
        "case <34 | shape <18 | step >8.1f | predicted >9.1f | twin >8.1f | of step >+8.1% | of "
        "saving >+9.1%"
    )
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
                table.row(case.name, shape.name, *[None] * 5)
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
            second += "" if held else "  out of range"
            about = (case.name, shape.name, step, cost.predicted_step_ms, step - saved)
            table.row(*about, -more / step, more / saved, note=second)
    number = sum(twin is not None for _, twin in twins)
    print("\nwithin 5 and 10 % of the saving, 5 % by either figure; most off, of the step")
    table = Table(
        "cost <18 | cases >6 | given >6 | within 5 % >11 | 10 % >6 | either >8 | in range >9 | "
        "most off >9.1%"
    )
    for name, found in off.items():
        near = [sum(saving <= most for _, saving, _, _ in found) for most in (0.05, 0.1)]
        either = sum(best <= 0.05 for _, _, best, _ in found)
        inside = sum(held for *_, held in found)
        most = max((step for step, *_ in found), default=0.0)
        table.row(name, number, len(found), *near, either, inside, most)


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
    right = agrees(truth, result)
    if result.verdict == "inconclusive":
        return "right" if right else "inconclusive"
    if len(result.ranks) > 1:
        right = right and {rank.verdict for rank in result.ranks} == {result.verdict}
    return "right" if right else "wrong"
