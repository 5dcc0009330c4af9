"""Damaged copies of labelled traces: how often an answer of high confidence is wrong.

Each trace is damaged in each of the ways of ``tests/damage/ways.py``, at a strength drawn from
five, until so many were tried. An answer is wrong where its verdict or its highest count differs
from the sound trace's. The ways called later were written when the rules that see damage stood.

  python -m benchmarks damage                       the traces of the repository
  python -m benchmarks damage --recorded FOLDER     and those that `accuracy --keep` left there
  python -m benchmarks damage --most 400 cut        fewer, and the ways whose name holds a word

The status is 1 where an answer was wrong at high confidence.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import click
from tests.damage.damaging import STRENGTHS, Answer, Labelled, answer, damaged, events_of, labelled
from tests.damage.ways import KNOWN, LATER, WAYS

from benchmarks._frame import Table, benchmark, folder_option, wanted, words

_COUNTED = ("tried", "silent", "wrong", "sure", "both")


@benchmark
@words()
@folder_option("--recorded", text="Further traces with their truths.")
@click.option("--most", default=2000, help="Damaged traces.")
@click.option("--trace", default="", help="A word of the traces' names.")
def main(words: Sequence[str], recorded: Path | None, most: int, trace: str) -> int:
    labels = [one for one in labelled(recorded) if trace in one.name]
    wrong = print_damaged(labels, most, [way for way in WAYS if wanted(way, words)])
    unsure = [one.name for one in labels if answer(events_of(one)).confidence == "low"]
    print(f"of {len(labels)} sound traces at low confidence: {', '.join(unsure) or 'none'}")
    return int(wrong > 0)


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


def print_damaged(labels: Sequence[Labelled], most: int, ways: Sequence[str] = tuple(WAYS)) -> int:
    """A line a way, and the answers that are wrong and sure; how many there are."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for label, way, strength, said in damage_all(labels, ways, most):
        wrong, sure = said.wrong(label), said.confidence == "high"
        silent = said.highest is None
        counts[way].update(tried=1, silent=silent, wrong=wrong, sure=sure, both=wrong and sure)
        if wrong and sure:
            print(f"{label.name}: {way} at {strength}: {label.verdict} {label.highest:g}, {said}")
    columns = {"tried": ">6", "no answer": ">10", "wrong": ">6", "high": ">6", "wrong, high": ">12"}
    table = Table({"": "<32", **columns})
    bad = 0
    for title, kinds in (("known", KNOWN), ("later", LATER)):
        total: Counter[str] = Counter()
        for way in kinds:
            if way in counts:
                total += counts[way]
                table.row(way, *(counts[way][name] for name in _COUNTED))
        table.row(f"all {title} ways", *(total[name] for name in _COUNTED))
        bad += total["both"]
    return bad
