"""Record every case with its oracle, analyse the trace, and print truth beside answer.

    python benchmarks/accuracy.py                            on the CPU
    python benchmarks/accuracy.py --evidence annotated       with the annotations of `run`
    python benchmarks/accuracy.py --device rig               backward on a thread of its own
    python benchmarks/accuracy.py --device cuda --attention flash efficient cudnn math
    python benchmarks/accuracy.py --group distributed --ranks 2
    python benchmarks/accuracy.py --times µs                 as torch up to 2.3 writes them
    python benchmarks/accuracy.py --damaged 2000             and damaged copies of the traces

The truth is counted by the model itself while it trains (``tests/cases``); the analyser sees
nothing but the trace. With ``--keep FOLDER`` the traces and their truths stay there.

Each case is recorded by plain ``torch.profiler`` (evidence ``autograd``), and again with every
checkpointed call marked (``annotated``): then the annotations have to agree with the operators too.

Each trace is analysed as it is, and again with its times cut to whole ``µs``, on a host so fast
that a quarter of the operators last none: that is what torch wrote before 2.4.

Where a compiler hides what it recomputes, `inconclusive` for that reason is right as well, and
the table says so. With ``--ranks N`` the distributed cases run in N processes over gloo, and the
traces of all ranks have to give the truth.

Below the table: how often high confidence was wrong, and how often the plain count disagreed with
an answer that was right. ``--damaged N`` counts the first of the two over N damaged copies of
these traces, too (``benchmarks/damage.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.damage import Labelled, print_damaged
from tests.cases import device as rig
from tests.cases.architectures import ARCHITECTURES
from tests.cases.bystanders import BYSTANDERS
from tests.cases.case import Case, record
from tests.cases.coarse import write_coarse
from tests.cases.compiled import COMPILED
from tests.cases.discarded import DISCARDED
from tests.cases.distributed import DISTRIBUTED, record_ranks
from tests.cases.equal import EQUAL
from tests.cases.frameworks import INSTALLED
from tests.cases.functions import FUNCTIONS
from tests.cases.functions_more import MORE_FUNCTIONS
from tests.cases.functions_others import OTHERS, UNMARKED
from tests.cases.hooks import HOOKS
from tests.cases.huggingface import HUGGING_FACE
from tests.cases.kinds import KINDS
from tests.cases.kinds_short import KINDS_SHORT
from tests.cases.marked import annotating
from tests.cases.nesting import CASES
from tests.cases.places import PLACES
from tests.cases.schedules import SCHEDULES
from tests.cases.stacks import STACKS
from tests.cases.truth import Truth, write_truth

from recompute_scan import trace as traces
from recompute_scan.analysis.answer import result_of
from recompute_scan.recompute.facts import study
from recompute_scan.result import Result

GROUPS: dict[str, tuple[Case, ...]] = {
    "core": CASES,
    "huggingface": HUGGING_FACE,
    "architectures": ARCHITECTURES,
    "bystanders": BYSTANDERS + HOOKS,
    "schedules": SCHEDULES,
    "places": PLACES + STACKS + DISCARDED,
    "equal": EQUAL,
    "kinds": (*KINDS, *KINDS_SHORT),
    "distributed": DISTRIBUTED,
    "compiled": COMPILED,
    "functions": FUNCTIONS + MORE_FUNCTIONS,
    "others": OTHERS,
    "frameworks": INSTALLED,
}

# Open to the answer that the compiler hides it.
HIDDEN = frozenset(case.name for case in COMPILED if case.verdict is None)

# What torch.nn.attention.SDPBackend calls them, since 2.3.
BACKENDS = {
    "any": None,
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
EVIDENCE = ("autograd", "annotated")
# The unit of the trace's times.
TIMES = ("ns", "µs")


@dataclass(frozen=True)
class Recording:
    """One trace with its truth."""

    title: str
    attention: str
    evidence: str
    trace: Path
    truth: Truth
    times: str = "ns"


@dataclass
class Tally:
    """What is counted over all answers.

    Attributes:
        right: Right ones.
        sure: Those of high confidence.
        sure_and_wrong: Wrong ones among them.
        alarms: Right ones that the plain count disagrees with.
        recordings: What was asked.
    """

    right: int = 0
    sure: int = 0
    sure_and_wrong: int = 0
    alarms: int = 0
    recordings: list[Recording] = field(default_factory=list)

    def add(self, recording: Recording, result: Result, right: bool) -> None:
        """Count one answer."""
        sure = result.confidence == "high"
        self.right += right
        self.sure += sure
        self.sure_and_wrong += sure and not right
        differs = result.cross_check is not None and result.cross_check.agrees is False
        self.alarms += right and differs and result.verdict != "inconclusive"
        self.recordings.append(recording)

    @property
    def labels(self) -> list[Labelled]:
        """The traces with a verdict of their own, as they were recorded."""
        return [
            Labelled(one.title, one.trace, one.truth.verdict, _highest(one.truth))
            for one in self.recordings
            if one.times == "ns" and one.truth.verdict is not None
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the status is 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help="cases; all by default")
    parser.add_argument("--group", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", nargs="*", choices=BACKENDS, default=["any"])
    parser.add_argument("--evidence", nargs="*", choices=EVIDENCE, default=EVIDENCE)
    parser.add_argument("--times", nargs="*", choices=TIMES, default=TIMES)
    parser.add_argument("--ranks", type=int, default=1, help="processes of distributed cases")
    parser.add_argument("--damaged", type=int, default=0, metavar="N", help="damaged copies")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.device == rig.NAME:
        rig.install()
    chosen = [
        case
        for group in options.group
        for case in GROUPS[group]
        if not options.names or case.name in options.names
        if options.device != rig.NAME or case.name not in rig.UNABLE
    ]
    with _folder(options.keep) as folder:
        tally = print_table(
            (
                recording
                for attention in options.attention
                for case in chosen
                for evidence in options.evidence
                for recording in _record(case, attention, evidence, folder, options)
                for recording in _timed(recording, options.times)
            ),
            options.device,
        )
        wrong = print_damaged(tally.labels, options.damaged) if options.damaged else 0
    return int(tally.right < len(tally.recordings) or wrong > 0)


def print_table(recordings: Iterator[Recording], device: str) -> Tally:
    """Truth beside answer, a line a recording, and what was counted."""
    tally = Tally()
    where = torch.cuda.get_device_name() if device.startswith("cuda") else device.upper()
    print(f"on {where}")
    head = f"{'case':34} {'torch':12} {'attention':10} {'evidence':10} {'times':5} "
    print(f"{head}{'truth':22} {'answer':22} right")
    for recording in recordings:
        result, good = _answer(recording)
        tally.add(recording, result, good)
        print(
            f"{recording.title:34} {torch.__version__:12} {recording.attention:10} "
            f"{recording.evidence:10} {recording.times:5} {_expected(recording.truth):22} "
            f"{_said(result):22} {'yes' if good else 'NO'}",
            flush=True,
        )
    total = len(tally.recordings)
    print(f"high confidence: {tally.sure} of {total}, {tally.sure_and_wrong} of them wrong")
    print(f"the plain count disagrees with a right answer: {tally.alarms} of {total}")
    print(f"{tally.right} of {total} right")
    return tally


def _record(
    case: Case, attention: str, evidence: str, folder: Path, options: argparse.Namespace
) -> list[Recording]:
    if case in DISTRIBUTED and options.ranks > 1:
        return [
            Recording(trace.name.removesuffix(".json.gz"), attention, evidence, trace, truth)
            for trace, truth in record_ranks(
                case.name, folder, options.ranks, marked=evidence == "annotated"
            )
        ]
    parts = (
        case.name,
        *(part for part in (attention, evidence) if part not in ("any", "autograd")),
    )
    trace = folder / f"{'.'.join(parts)}.json.gz"
    with (
        only(BACKENDS[attention]),
        annotating() if evidence == "annotated" else contextlib.nullcontext(),
    ):
        truth = record(case, trace, options.device)
    write_truth(trace.with_name(trace.name.replace(".json.gz", ".truth.json")), truth)
    return [Recording(case.name, attention, evidence, trace, truth)]


def _timed(recording: Recording, times: Sequence[str]) -> Iterator[Recording]:
    """The recording as it is, and with its times cut, as far as asked for."""
    if "ns" in times:
        yield recording
    if "µs" in times:
        stem = recording.trace.name.removesuffix(".json.gz")
        target = recording.trace.with_name(f"{stem}.us.json.gz")
        yield replace(recording, times="µs", trace=write_coarse(recording.trace, target))


def only(backend: str | None) -> AbstractContextManager[None]:
    """Attention by that backend alone, where one is named."""
    if backend is None:
        return contextlib.nullcontext()
    attention = torch.nn.attention
    return attention.sdpa_kernel(getattr(attention.SDPBackend, backend))


def _answer(recording: Recording) -> tuple[Result, bool]:
    trace = traces.load(recording.trace)
    result, found = result_of(trace), study(trace).annotations
    agree = found is None or found.disagreeing == 0
    if recording.truth.name in UNMARKED and not agree:
        agree = result.confidence != "high"
    return result, agree and _agrees(recording.truth, result)


def _agrees(truth: Truth, result: Result) -> bool:
    if truth.name in HIDDEN and result.verdict == "inconclusive":
        return "compiled" in (result.reason or "")
    same_verdict = truth.verdict in (None, result.verdict)
    return same_verdict and result.recompute_per_backward == _highest(truth)


def _highest(truth: Truth) -> float:
    return max(max(layer) for layer in truth.multiplicity())


def _expected(truth: Truth) -> str:
    verdict = truth.verdict or ("compiled" if truth.name in HIDDEN else "open")
    return f"{verdict} {_highest(truth):g}"


def _said(result: Result) -> str:
    runs = result.recompute_per_backward
    return f"{result.verdict} {'-' if runs is None else f'{runs:g}'}"


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
