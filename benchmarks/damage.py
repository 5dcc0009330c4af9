"""Damage labelled traces in many ways, and count how often high confidence is wrong.

    python benchmarks/damage.py                       the traces of the repository
    python benchmarks/damage.py --recorded FOLDER     and those that `tests.cases` recorded there
    python benchmarks/damage.py --most 400 --way cut  fewer, and the ways whose name holds a word

Each trace is damaged in each of the ways of ``damages.py``, at a strength drawn from five, until
so many were tried. An answer is wrong where its verdict or its highest count is not that of the
sound trace. Ends with 1 where one was wrong at high confidence. The ways of ``LATER`` were
written when the rules that see damage stood, and are counted apart.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import damages
from tests.cases.truth import read_truth
from tests.trace.kineto_reading import read

from recompute_scan.analysis.confidence import confidence
from recompute_scan.errors import ScanError
from recompute_scan.recompute.facts import study

TRACES = Path(__file__).resolve().parent.parent / "traces"
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
            highest = max(max(layer) for layer in truth.multiplicity())
            found.append(Labelled(truth.name, trace, truth.verdict, highest))
    return found


def damaged(
    events: Sequence[damages.Event], way: str, strength: float, seed: str
) -> list[damages.Event]:
    """The events, damaged in one way; the same seed gives the same damage."""
    return damages.WAYS[way](list(events), strength, Random(f"{seed} {way} {strength}"))


def answer(events: Sequence[damages.Event]) -> Answer:
    """What is said of a trace of these events."""
    data = msgspec.json.encode({"traceEvents": events})
    try:
        facts = study(read(io.BytesIO(data), "damaged.json"))
    except ScanError as error:
        return Answer(error.code, None, "low")
    return Answer(facts.judgement.verdict, facts.judgement.highest, confidence(facts))


def events_of(label: Labelled) -> list[damages.Event]:
    """The events of a labelled trace, as its file has them."""
    data = gzip.decompress(label.path.read_bytes())
    document = json.loads(data)
    events: list[damages.Event] = (
        document if isinstance(document, list) else document["traceEvents"]
    )
    return [event for event in events if event.get("cat") not in ("python_function", "Python")]


def damage_all(
    labels: Sequence[Labelled], ways: Sequence[str], most: int
) -> Iterator[tuple[Labelled, str, float, Answer]]:
    """Each damaged trace with what was said of it; of every trace about as many."""
    every = [(way, strength) for way in ways for strength in STRENGTHS]
    left = most
    for at, label in enumerate(labels):
        share = min(len(every), math.ceil(left / (len(labels) - at)))
        left -= share
        events = events_of(label) if share else []
        for way, strength in Random(label.name).sample(every, share):
            yield label, way, strength, answer(damaged(events, way, strength, label.name))


def print_damaged(
    labels: Sequence[Labelled], most: int, ways: Sequence[str] = tuple(damages.WAYS)
) -> int:
    """A line a way, and those that are wrong and sure; how many there are."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for label, way, strength, said in damage_all(labels, ways, most):
        wrong = said.wrong(label)
        counts[way].update(
            tried=1,
            silent=said.highest is None,
            wrong=wrong,
            sure=said.confidence == "high",
            both=wrong and said.confidence == "high",
        )
        if wrong and said.confidence == "high":
            print(f"{label.name}: {way} at {strength}: {label.verdict} {label.highest:g}, {said}")
    return _print(counts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a way; the status is 1 when an answer of high confidence is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorded", type=Path, metavar="FOLDER")
    parser.add_argument("--most", type=int, default=2000, help="damaged traces")
    parser.add_argument("--way", nargs="*", default=[], help="words of their names")
    parser.add_argument("--trace", nargs="*", default=[], help="words of their names")
    options = parser.parse_args(arguments)
    labels = [x for x in labelled(options.recorded) if _named(x.name, options.trace)]
    ways = [way for way in damages.WAYS if _named(way, options.way)]
    wrong = print_damaged(labels, options.most, ways)
    unsure = [x.name for x in labels if answer(events_of(x)).confidence == "low"]
    print(f"of {len(labels)} sound traces at low confidence: {', '.join(unsure) or 'none'}")
    return int(wrong > 0)


def _named(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


def _print(counts: dict[str, Counter[str]]) -> int:
    columns = ("tried", "silent", "wrong", "sure", "both")
    print(f"{'':32} {'tried':>6} {'no answer':>10} {'wrong':>6} {'high':>6} {'wrong, high':>12}")
    bad = 0
    for title, ways in (("known", damages.KNOWN), ("later", damages.LATER)):
        total: Counter[str] = Counter()
        for way in ways:
            if way in counts:
                total += counts[way]
                print(_row(way, counts[way], columns))
        print(_row(f"all {title} ways", total, columns))
        bad += total["both"]
    return bad


def _row(title: str, counts: Counter[str], columns: Sequence[str]) -> str:
    widths = (6, 10, 6, 6, 12)
    cells = (f"{counts[name]:>{width}}" for name, width in zip(columns, widths, strict=True))
    return f"{title:32} {' '.join(cells)}"


if __name__ == "__main__":
    sys.exit(main())
