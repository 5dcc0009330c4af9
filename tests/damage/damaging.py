"""Labelled traces, damaged, and what is said of them."""

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from recompute_scan.errors import ScanError
from recompute_scan.recompute.checks import confidence
from recompute_scan.recompute.study import study
from tests.cases.groups import highest
from tests.cases.truth import read_truth
from tests.damage import ways
from tests.trace.kineto_reading import read

TRACES = Path(__file__).resolve().parents[2] / "traces"
STRENGTHS = (0.01, 0.05, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Labelled:
    """A sound trace with its answer: the verdict, and the highest count."""

    name: str
    path: Path
    verdict: str
    highest: float


@dataclass(frozen=True)
class Answer:
    """What is said of one damaged trace; ``verdict`` is an error's code where it was refused."""

    verdict: str
    highest: float | None
    confidence: str

    def wrong(self, label: Labelled) -> bool:
        """Is the verdict or the count another one? Refusals and silence are not wrong."""
        silent = self.verdict.startswith("E") or self.verdict == "inconclusive"
        return not silent and (self.verdict, self.highest) != (label.verdict, label.highest)


def labelled(recorded: Path | None = None) -> list[Labelled]:
    """The repository's traces that have a verdict, and those that were recorded elsewhere."""
    found = []
    for name, label in json.loads((TRACES / "expected.json").read_text()).items():
        path = TRACES / name / "trace-rank0.json.gz"
        found.append(Labelled(name, path, label["verdict"], label["recompute_per_backward"]))
    for name, label in json.loads((TRACES / "public" / "expected.json").read_text()).items():
        if label["verdict"] != "inconclusive":
            path = TRACES / "public" / name
            found.append(Labelled(name, path, label["verdict"], label["recompute_per_backward"]))
    for path in sorted(recorded.glob("*.truth.json")) if recorded else ():
        truth = read_truth(path)
        if truth.verdict is not None:
            trace = path.with_name(path.name.replace(".truth.json", ".json.gz"))
            found.append(Labelled(truth.name, trace, truth.verdict, highest(truth)))
    return found


def damaged(events: Sequence[ways.Event], way: str, strength: float, seed: str) -> list[ways.Event]:
    """The events, damaged in one way; the same seed gives the same damage."""
    return ways.WAYS[way](list(events), strength, Random(f"{seed} {way} {strength}"))


def answer(events: Sequence[ways.Event]) -> Answer:
    """What is said of a trace of these events."""
    data = msgspec.json.encode({"traceEvents": events})
    try:
        facts = study(read(io.BytesIO(data), "damaged.json"))
    except ScanError as error:
        return Answer(error.code, None, "low")
    return Answer(facts.judgement.verdict, facts.judgement.highest, confidence(facts))


def events_of(label: Labelled) -> list[ways.Event]:
    """The events of a labelled trace, as its file has them."""
    data = gzip.decompress(label.path.read_bytes())
    document = json.loads(data)
    events: list[ways.Event] = document if isinstance(document, list) else document["traceEvents"]
    return [event for event in events if event.get("cat") not in ("python_function", "Python")]
