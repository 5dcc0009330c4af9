"""Which constants of the prediction recordings ask for, and how firmly.

Tried are factors for what a saved tensor takes (``Hooks``), for ending a recompute, and the usual
share of the time between two events that is the profiler's. A setting's score is the mean absolute
error; the median hardly moves with what only some changes ask for. How far the score of another
setting may lie from the best one's by chance is drawn: other models of the same kinds, and other
turns of each measurement. Of all settings that could be the best, the one nearest to today's is
taken; that says something only where others could not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recompute_scan.cost import predict as predicting
from recompute_scan.cost.hooks import TYPICAL, Hooks
from recompute_scan.cost.phases import Float64
from recompute_scan.cost.reruns import Keep
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.trace.columns import Bool, Int64

FACTORS = (0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
STOPS = (0.0, 0.5, 1.0, 1.5, 2.0)
SHARES = (0.65, 0.75, 0.85, 0.95)
SETTINGS = np.array(list(itertools.product(FACTORS, STOPS, SHARES)))
TODAY = int(np.flatnonzero((SETTINGS == (1.0, 1.0, predicting._USUAL)).all(axis=1))[0])
# How many places of the grid each is from today's.
_STEPS = sum(
    np.abs(np.searchsorted(values, SETTINGS[:, at]) - np.searchsorted(values, SETTINGS[TODAY, at]))
    for at, values in enumerate((FACTORS, STOPS, SHARES))
)
DRAWS = 400
HALVES = 200


@dataclass(frozen=True)
class Recorded:
    """A recording with its truth.

    Attributes:
        facts: Of the trace before the change.
        timed: Steps right before it, without the profiler, ns.
        keep: What the change leaves; ``None``: no checkpoint.
        ratios: Of each turn, the step after the change to that before.
    """

    facts: RecomputeFacts
    timed: Float64
    keep: Keep | None
    ratios: Float64


@dataclass(frozen=True)
class Choice:
    """What some recordings ask for; positions in ``SETTINGS``."""

    best: int
    nearest: int
    possible: Bool


class Scores:
    """The errors of all settings in all recordings, and what they could be by chance."""

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        self._random = np.random.default_rng(0)
        self._predicted = np.array([list(_shares(one)) for one in recorded]).T
        truth = np.array([np.median(one.ratios) for one in recorded])
        self._truths = np.array([self._truth(one) for one in recorded]).T
        self.errors = np.abs(self._predicted / truth - 1)

    def _truth(self, one: Recorded) -> Float64:
        drawn = self._random.choice(one.ratios, (DRAWS, len(one.ratios)))
        return np.asarray(np.median(drawn, axis=1))

    def drawn(self, cases: Int64, draws: int = DRAWS) -> Float64:
        """Scores of all settings with other models, and with other turns; a row for each draw."""
        among = self._random.choice(cases, (draws, len(cases)))
        return np.array(
            [
                np.abs(self._predicted[:, places] / self._truths[draw, places] - 1).mean(axis=1)
                for draw, places in enumerate(among)
            ]
        )

    def choose(self, cases: Int64, draws: int = DRAWS) -> Choice:
        """The best setting for these recordings, and of all that could be it today's neighbour."""
        best = int(self.errors[:, cases].mean(axis=1).argmin())
        drawn = self.drawn(cases, draws)
        possible = np.quantile(drawn - drawn[:, [best]], 0.025, axis=0) <= 0
        return Choice(best, int(np.where(possible, _STEPS, np.inf).argmin()), possible)


def show_halves(recorded: Sequence[Recorded]) -> None:
    """Print what halves of the recordings would choose, and what that does in the other half."""
    scores, place = Scores(recorded), np.arange(len(recorded))
    leaves = np.array([one.keep is not None for one in recorded])
    print("settings: factor for saved tensors, for ending a recompute, usual share; scores in %")
    print(
        f"{'from':22} {'as is':>12} {'best':>22} {'could be best':>14} {'nearest':>18} "
        f"{'left out, as is / best / nearest':>34}"
    )
    for name, half in (
        ("all", place >= 0),
        ("every other one", place % 2 == 0),
        ("the others", place % 2 == 1),
        ("changes to one", leaves),
        ("changes to none", ~leaves),
    ):
        cases, left = np.flatnonzero(half), np.flatnonzero(~half)
        if not len(cases):
            continue
        found = scores.choose(cases)
        now = 100 * scores.errors[:, cases].mean(axis=1)
        noise = 100 * scores.drawn(cases)[:, TODAY].std()
        there = 100 * scores.errors[:, left].mean(axis=1) if len(left) else None
        print(
            f"{name:22} {now[TODAY]:5.2f} ± {noise:.2f} {now[found.best]:5.2f} "
            f"{_told(found.best):>16} {found.possible.sum():7} of {len(SETTINGS):3} "
            f"{_told(found.nearest):>18}"
            + "".join(f"{there[at]:11.2f}" for at in _three(found) if there is not None)
        )
        if name == "all":
            for column, constant in enumerate(("saved tensors", "ending", "usual share")):
                values = SETTINGS[found.possible, column]
                print(f"    {constant}: {values.min():g} to {values.max():g} could be best")
    halves = [scores._random.permutation(place)[: len(place) // 2] for _ in range(HALVES)]
    choices = [scores.choose(half, DRAWS // 4) for half in halves]
    kept = sum(choice.possible[TODAY] for choice in choices)
    print(f"{HALVES} random halves: today's could be best in {kept}")


def _three(found: Choice) -> tuple[int, int, int]:
    return TODAY, found.best, found.nearest


def _shares(one: Recorded) -> Iterator[float]:
    """The predicted share for each setting, which is linear in the first two constants."""
    usual, parts = predicting._USUAL, []
    saving = Hooks(TYPICAL.gradient_ns, TYPICAL.hook_ns, 0.0)
    stopping = Hooks(0.0, 0.0, TYPICAL.stop_ns)
    for share in SHARES:
        vars(predicting)["_USUAL"] = share
        base = predicting.prepare(one.facts, one.timed)
        assert base is not None
        each = (
            predicting.predict(base, one.keep, hooks).share
            for hooks in (Hooks(0.0, 0.0, 0.0), saving, stopping)
        )
        parts.append(tuple(each))
    vars(predicting)["_USUAL"] = usual
    for factor, stop, share in SETTINGS:
        bare, saves, stops = parts[SHARES.index(share)]
        yield bare + factor * (saves - bare) + stop * (stops - bare)


def _told(setting: int) -> str:
    return " / ".join(f"{value:g}" for value in SETTINGS[setting])
