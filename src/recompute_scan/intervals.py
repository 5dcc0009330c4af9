"""How sure the median of step times is, and of the ratio of two ways to run them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

# The share that an interval of 95 %, and one of 98.5 %, leaves out on each side.
_ONE_SIDE, _ONE_SIDE_OF_A_LOOK = 0.025, 0.0075
# Student's t for 98.5 % at 1, 2, … degrees of freedom, and for very many. So much at each look,
# because the question is asked anew until it is answered: after two rounds, and then after each of
# four runs of pairs, or of four rounds more, the rule for many rounds included. That makes 92 % of
# all (`tests/test_verification.py` draws both).
_T = (42.43, 8.073, 5.047, 4.088, 3.634)
_NORMAL = 2.432
# The smallest and the largest of so many values hold the median of all with more than 96 %.
_MANY = 6
# Fewer pairs of steps hold the median of all less surely than intended, even by their range.
FEWEST_PAIRS = 8
# An interval wider than this share of its median says that a figure cannot rest on it.
_TOO_WIDE = 0.25
# Of the width of an interval of 95 % to a standard error.
_ERRORS_95 = 2 * 1.96


def median_interval(times: Sequence[float], one_side: float = _ONE_SIDE) -> tuple[float, float]:
    """Lowest and highest value of an interval of the median of these times, of 95 % by default.

    By order statistics, whatever the distribution: for n times the r-th smallest and the r-th
    largest hold the median with probability 1 - 2 P(Binomial(n, 1/2) < r) (David and Nagaraja,
    *Order Statistics*, section 7.1). Below six times even their range holds it less surely
    than with 95 %.

    Args:
        times: At least one.
        one_side: How often the median may lie below the interval, and how often above.
    """
    ordered = sorted(times)
    number, rank, below = len(ordered), 1, 0.5 ** len(ordered)
    while rank < number // 2:
        below += math.comb(number, rank) * 0.5**number
        if below > one_side:
            break
        rank += 1
    return ordered[rank - 1], ordered[number - rank]


def too_wide(middle: float, low: float, high: float) -> bool:
    """Do the times vary so much that no figure can rest on their median?"""
    return high - low > _TOO_WIDE * middle


def is_rough(value: float, low: float, high: float) -> bool:
    """Is a value known no better than to half of itself, so that its digits say nothing?"""
    return high - low > abs(value)


def is_sure(number: int) -> bool:
    """Does the interval of the median of so many times hold it with 95 %?"""
    return number >= _MANY


def pair_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The ratio of the second times to the first, at least and at most, by pairs.

    Each pair is two neighbouring steps of one process, which what else a machine does slows alike.
    By order statistics of their ratios, with 98.5 %, because the question is asked anew after
    every run.

    Args:
        pairs: Step times unchanged and with the fix, at least 8 pairs; all above 0.
    """
    return median_interval([after / before for before, after in pairs], _ONE_SIDE_OF_A_LOOK)


def ratio_interval(
    rounds: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[float, float]:
    """The ratio of the second times to the first, at least and at most, by medians of rounds.

    A machine that is slower in one round than in another slows both sides of it, so each round
    gives one ratio; how far these lie apart says how sure their mean is (Student's t, of their
    logarithms), and never surer than the times within the runs allow. From six rounds on the range
    of the ratios is given where it is the narrower one: it holds their median whatever the
    distribution, where a single round that a burst of other work fell into makes Student's t wide.

    Args:
        rounds: Step times of one run unchanged and of one with the fix, at least one pair; all
            above 0.
    """
    ratios = [math.log(median(after) / median(before)) for before, after in rounds]
    within = math.sqrt(
        sum(_error(before) ** 2 + _error(after) ** 2 for before, after in rounds) / len(rounds)
    )
    half = _NORMAL * within
    if len(ratios) > 1:
        half = max(half, _T[min(len(ratios) - 2, len(_T) - 1)] * stdev(ratios))
    half /= math.sqrt(len(ratios))
    if len(ratios) >= _MANY and max(ratios) - min(ratios) < 2 * half:
        return math.exp(min(ratios)), math.exp(max(ratios))
    return math.exp(fmean(ratios) - half), math.exp(fmean(ratios) + half)


def _error(times: Sequence[float]) -> float:
    """Standard error of the logarithm of the median of these times."""
    low, high = median_interval(times)
    return math.log(high / low) / _ERRORS_95
