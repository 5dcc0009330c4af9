"""Every recorded case: the model's own count beside the answer from its trace.

Each case is recorded by plain torch.profiler (evidence ``autograd``), and again with every
checkpointed call marked (``annotated``), whose annotations have to agree with the operators. Each
trace is read as it is, and with its times cut to whole ``µs`` on a host so fast that a quarter of
the operators last none, as torch wrote them before 2.4. Where a compiler hides what it recomputes,
`inconclusive` for that reason is right as well, and so it is of a GPU's trace that is read without
its operators (``kernels``).

  python -m benchmarks accuracy
  python -m benchmarks accuracy --device rig        backward on a thread of its own
  python -m benchmarks accuracy --device cuda --attention flash,efficient,cudnn,math
  python -m benchmarks accuracy --device cuda --group gpu-graph --evidence autograd,kernels
  python -m benchmarks accuracy --group distributed --ranks 2
  python -m benchmarks accuracy --damaged 2000      and damaged copies of the traces
  python -m benchmarks accuracy --recorded traces/gpu/h100    traces that are there, with truths

The status is 1 where an answer is wrong, or a case cannot be recorded for another reason than that
the backend of attention has no kernel for it.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
from tests.cases import device as rig
from tests.cases.case import Case, record
from tests.cases.coarse import without_operators, write_coarse
from tests.cases.distributed import DISTRIBUTED, leave_group, record_ranks
from tests.cases.functions_others import UNMARKED
from tests.cases.gpu_matrix import GRAPHS
from tests.cases.groups import ALL_GROUPS, GROUPS, HIDDEN, chosen, expected, highest
from tests.cases.marked import annotating
from tests.cases.truth import Truth, write_truth
from tests.cases.truth import truth_of as truth_from
from tests.damage.damaging import Labelled

from benchmarks._frame import Table, benchmark, folder_option, kept_in, some, words
from benchmarks.damage import print_damaged
from recompute_scan import trace as traces
from recompute_scan.analysis.pipeline import result_of
from recompute_scan.recompute.study import study
from recompute_scan.result import Result

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
# Groups that need neither processes nor a compiler.
ALONE = [name for name in GROUPS if name not in ("distributed", "compiled", "frameworks")]


@dataclass(frozen=True)
class Recording:
    """One trace with its truth; `open` where `inconclusive` is right as well."""

    title: str
    attention: str
    evidence: str
    trace: Path
    truth: Truth
    times: str = "ns"
    open: bool = False


@dataclass
class Tally:
    """What is counted over all answers.

    Attributes:
        right: Right ones.
        sure: Answers of high confidence.
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
            Labelled(one.title, one.trace, one.truth.verdict, highest(one.truth))
            for one in self.recordings
            if one.times == "ns" and one.truth.verdict is not None
        ]


@benchmark
@words("names")
@some("--group", ALL_GROUPS, default=GROUPS, text="Groups of cases; without those of a GPU.")
@click.option("--device", default="cpu", help="Of torch, or `rig`.")
@some("--attention", BACKENDS, default=["any"], text="Backends of attention.")
@some("--evidence", [*EVIDENCE, "kernels"], default=EVIDENCE, text="How they are recorded.")
@some("--times", TIMES, text="How times are written.")
@click.option("--ranks", default=1, help="Processes of distributed cases.")
@click.option("--damaged", default=0, help="Damaged copies.")
@folder_option("--keep", text="Where traces and truths stay.")
@folder_option("--recorded", text="Record nothing: read the traces there, with `truth.json`.")
def main(
    names: Sequence[str],
    group: Sequence[str],
    device: str,
    attention: Sequence[str],
    evidence: Sequence[str],
    times: Sequence[str],
    ranks: int,
    damaged: int,
    keep: Path | None,
    recorded: Path | None,
) -> int:
    if recorded is not None:
        return read_again(recorded)
    if device == rig.NAME:
        rig.install()
        group = [name for name in group if name in ALONE]
    cuda = device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here; try --device cpu")
    place = torch.cuda.get_device_name() if cuda else device.upper()
    unable = rig.UNABLE if device == rig.NAME else frozenset() if cuda else GRAPHS
    cases = [one for one in chosen(group, names) if one.name not in unable]
    failures: list[str] = []

    def from_cases(folder: Path) -> Iterator[Recording]:
        ways = [one for one in evidence if one != "kernels"]
        for backend, case, how in itertools.product(attention, cases, ways):
            try:
                found = record_all(case, backend, how, folder, device, ranks)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
                failures.append(f"{case.name}, {backend}, {how}: {reason}")
                continue
            for one in found:
                yield from _timed(one, times)
                if how == "autograd" and "kernels" in evidence:
                    alone = without_operators(one.trace, one.trace.with_suffix(".alone.gz"))
                    yield replace(one, evidence="kernels", trace=alone, open=True)

    with kept_in(keep) as folder:
        tally = print_table(from_cases(folder), place)
        wrong = print_damaged(tally.labels, damaged) if damaged else 0
    leave_group()
    print(*(f"not recorded: {one}" for one in failures), sep="\n", end="")
    failed = any("No available kernel" not in one for one in failures)
    return int(failed or not 0 < tally.right == len(tally.recordings) or wrong > 0)


def print_table(rows: Iterator[Recording], place: str, version: str = torch.__version__) -> Tally:
    """Truth beside answer, a line a recording, and what was counted."""
    tally = Tally()
    print(f"on {place}")
    table = Table(
        "case <34 | torch <12 | attention <10 | evidence <10 | times <5 | truth <22 | answer <22 "
        "| right <3"
    )
    for one in rows:
        result, good = _answer(one)
        tally.add(one, result, good)
        about = (one.title, version, one.attention, one.evidence, one.times)
        table.row(*about, expected(one.truth), _said(result), "yes" if good else "NO")
    total = len(tally.recordings)
    print(f"high confidence: {tally.sure} of {total}, {tally.sure_and_wrong} of them wrong")
    print(f"the plain count disagrees with a right answer: {tally.alarms} of {total}")
    print(f"{tally.right} of {total} right")
    return tally


def record_all(
    case: Case, attention: str, evidence: str, folder: Path, device: str, ranks: int
) -> list[Recording]:
    """The case's recording, or one of each rank."""
    if case in DISTRIBUTED and ranks > 1:
        return [
            Recording(trace.name.removesuffix(".json.gz"), attention, evidence, trace, truth)
            for trace, truth in record_ranks(
                case.name, folder, ranks, marked=evidence == "annotated"
            )
        ]
    parts = [part for part in (attention, evidence) if part not in ("any", "autograd")]
    stem = ".".join((case.name, *parts))
    trace = folder / f"{stem}.json.gz"
    truth = truth_of(case, trace, attention, evidence, device)
    write_truth(folder / f"{stem}.truth.json", truth)
    return [Recording(case.name, attention, evidence, trace, truth)]


def truth_of(case: Case, trace: Path, attention: str, evidence: str, device: str) -> Truth:
    """Record the case with that backend alone, marked or not."""
    # Neither computes in 32 bits.
    half = attention in ("flash", "cudnn") and device != "cpu"
    bits = torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()
    with only(BACKENDS[attention]), marked(evidence == "annotated"), bits:
        return record(case, trace, device)


def marked(yes: bool) -> AbstractContextManager[object]:
    """Checkpointed calls get the annotations of ``run``, where asked for."""
    return annotating() if yes else contextlib.nullcontext()


def only(backend: str | None) -> AbstractContextManager[None]:
    """Attention by that backend alone, where one is named."""
    if backend is None:
        return contextlib.nullcontext()
    attention = torch.nn.attention
    return attention.sdpa_kernel(getattr(attention.SDPBackend, backend))


def read_again(folder: Path) -> int:
    """Traces that are there, as they are and without their operators; 1 where one is answered
    wrongly. Their truths are in one `truth.json`, or in NAME.truth.json beside each NAME.json.gz.
    """
    document: dict[str, Any] = {"gpu": str(folder), "torch": "-", "truths": {}}
    for path in sorted(folder.rglob("*truth.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        name = path.relative_to(folder).as_posix().removesuffix(".truth.json")
        document |= found if "truths" in found else {"truths": document["truths"] | {name: found}}
    gpu, version = document.get("gpu", "CPU"), document["torch"]
    tally = print_table(_recorded(folder, document["truths"]), gpu, version)
    return int(not 0 < tally.right == len(tally.recordings))


def _recorded(folder: Path, documents: Mapping[str, dict[str, Any]]) -> Iterator[Recording]:
    with kept_in(None) as target:
        for name, document in documents.items():
            trace, truth = folder / f"{name}.json.gz", truth_from(document)
            yield Recording(name, "-", "operators", trace, truth)
            alone = without_operators(trace, target / trace.name)
            yield Recording(name, "-", "kernels", alone, truth, open=True)


def _timed(recording: Recording, times: Sequence[str]) -> Iterator[Recording]:
    """The recording as it is, and with its times cut, as far as asked for."""
    if "ns" in times:
        yield recording
    if "µs" in times:
        stem = recording.trace.name.removesuffix(".json.gz")
        target = recording.trace.with_name(f"{stem}.us.json.gz")
        yield replace(recording, times="µs", trace=write_coarse(recording.trace, target))


def _answer(recording: Recording) -> tuple[Result, bool]:
    trace = traces.load(recording.trace)
    result, found = result_of(trace), study(trace).annotations
    agree = found is None or found.disagreeing == 0
    if recording.truth.name in UNMARKED and not agree:
        agree = result.confidence != "high"
    undecided = recording.open and result.verdict == "inconclusive"
    return result, agree and (undecided or agrees(recording.truth, result))


def agrees(truth: Truth, result: Result) -> bool:
    """Whether the answer is the truth, or says that a compiler hides it."""
    hidden = truth.name in HIDDEN or truth.name.startswith("compiled")
    if hidden and result.verdict == "inconclusive":
        return "compiled" in (result.reason or "")
    same_verdict = truth.verdict in (None, result.verdict)
    return same_verdict and result.recompute_per_backward == highest(truth)


def _said(result: Result) -> str:
    runs = result.recompute_per_backward
    return f"{result.verdict} {'-' if runs is None else f'{runs:g}'}"
