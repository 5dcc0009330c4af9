"""Record every core case on the ``rig``, and ask for the answer in the shapes that GPUs leave.

    python benchmarks/shapes.py                     all cases, a column per shape
    python benchmarks/shapes.py r_in_n --cost       and what the fix saves, beside the repaired twin

The rig is a device of torch's own kind without a device (``tests/cases/device.py``): autograd runs
its backward pass on a thread of its own. To its recordings kernels are added
(``tests/cases/shaped.py``). The truth is counted by the model while it is recorded. A dot is the
truth, ``?`` is `inconclusive`, and anything else is what was said instead.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cases import device
from tests.cases.case import Case, record
from tests.cases.nesting import CASES
from tests.cases.shaped import SHAPES, Event, Shape, as_bytes, shaped
from tests.cases.truth import Truth

from recompute_scan.analysis.answer import result_of
from recompute_scan.result import Result
from recompute_scan.trace.kineto.parse import parse

# What each doubled case is after the repair that the tool proposes.
REPAIRED = {
    "r_in_r": "r_outside",
    "n_in_r": "n_inside",
    "r_in_n": "n_outside",
    "r_in_wrapper": "n_outside",
    "n_in_n_no_early_stop": "n_outside_no_early_stop",
    "r_layers_in_n_stack": "r_outside",
    "r_layers_in_r_stack": "r_outside",
    "r_halves_in_r": "r_outside",
    "r_three_levels": "r_outside",
    "accumulation_doubled": "accumulation_once",
}

# The host limits these.
_BY_HOST = ("launch-bound", "two-streams")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the status is 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help="cases; all of core by default")
    parser.add_argument("--cost", action="store_true", help="what the fix saves, for doubled ones")
    options = parser.parse_args(arguments)
    device.install(launches=True)
    chosen = [case for case in CASES if not options.names or case.name in options.names]
    said: Counter[tuple[str, str]] = Counter()
    print(f"{'case':32} {'truth':12} " + " ".join(f"{shape.name:>16}" for shape in SHAPES))
    for case in chosen:
        truth, recording = recorded(case)
        row = []
        for shape in SHAPES:
            result = answer(recording, shape)
            how = judge(truth, result)
            said[shape.name, how] += 1
            row.append("." if how == "right" else "?" if how == "inconclusive" else told(result))
        expected = f"{truth.verdict or 'open'} {highest(truth):g}"
        print(f"{case.name:32} {expected:12} " + " ".join(f"{one:>16}" for one in row), flush=True)
    for how in ("right", "inconclusive", "wrong"):
        print(f"{how:45} " + " ".join(f"{said[shape.name, how]:16}" for shape in SHAPES))
    if options.cost:
        print_costs([case for case in chosen if case.name in REPAIRED])
    return int(any(how == "wrong" and number for (_, how), number in said.items()))


def print_costs(cases: Sequence[Case]) -> None:
    """Step now and after the fix, in ms: what the tool says, and the repaired twin's kernels."""
    print(f"\n{'case':24} {'shape':18} {'step':>8} {'predicted':>9} {'twin':>8} {'of step':>8}")
    for case in cases:
        twin = next(each for each in CASES if each.name == REPAIRED[case.name])
        recording, repaired = recorded(case)[1], recorded(twin)[1]
        for shape in SHAPES:
            cost = answer(recording, shape).cost
            if cost is None:
                print(f"{case.name:24} {shape.name:18} {'-':>8} {'-':>9}")
                continue
            made, after = shaped(recording, shape), shaped(repaired, shape)
            # Where kernels limit the step they are all that counts; else the twin's own step is.
            by_kernels = cost.step_ms - (made.busy_us - after.busy_us) / 1000
            twin_ms = after.step_us / 1000 if shape.name in _BY_HOST else by_kernels
            off = 100 * (cost.predicted_step_ms - twin_ms) / cost.step_ms
            print(
                f"{case.name:24} {shape.name:18} {cost.step_ms:8.1f} "
                f"{cost.predicted_step_ms:9.1f} {twin_ms:8.1f} {off:+7.1f}%"
            )


def recorded(case: Case) -> tuple[Truth, Event]:
    """The case's truth and its recording, with its launches."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        truth = record(case, trace, device.NAME)
        found: Event = json.loads(gzip.decompress(trace.read_bytes()))
    return truth, found


def answer(recording: Event, shape: Shape) -> Result:
    """What the tool says of the recording in that shape."""
    return result_of(parse(as_bytes(shaped(recording, shape)), shape.name))


def judge(truth: Truth, result: Result) -> str:
    """``right``, ``inconclusive`` or ``wrong``."""
    if result.verdict == "inconclusive":
        return "inconclusive"
    same = truth.verdict in (None, result.verdict)
    return "right" if same and result.recompute_per_backward == highest(truth) else "wrong"


def highest(truth: Truth) -> float:
    """Highest multiplicity of any part."""
    return max(max(layer) for layer in truth.multiplicity())


def told(result: Result) -> str:
    """The verdict with its number."""
    return f"{result.verdict} {result.recompute_per_backward:g}"


if __name__ == "__main__":
    sys.exit(main())
