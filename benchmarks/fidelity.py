"""Trainings with checkpoints: how far their gradients are from those without, and what is said.

    python benchmarks/fidelity.py
    python benchmarks/fidelity.py --accuracy                       the cases of make accuracy
    python benchmarks/fidelity.py --accuracy core distributed      some groups of them

The truth is measured: each training takes one step with its checkpoints and one without them, from
the same seeds. What is said is what `recompute-scan run` would say of a step that it compares.
Exits with 1 where the two disagree, or where the operator or module named is not the right one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import GROUPS
from benchmarks.machine import processor, versions
from tests.fidelity.accuracy_cases import look_at
from tests.fidelity.cases import CASES
from tests.fidelity.compare import compare, wrong
from tests.fidelity.hard_cases import HARD
from tests.fidelity.models import MODELS
from tests.fidelity.truth import measure


def main() -> int:
    """Print the table; 1 where an answer is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--accuracy", nargs="*", choices=GROUPS, metavar="GROUP")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    print(f"{processor()}, {versions(('torch', 'transformers'))}")
    return look_alikes() if asked.accuracy is None else accuracy_cases(asked.accuracy or GROUPS)


def look_alikes() -> int:
    """Trainings that are wrong, or right and look suspicious."""
    mistakes = alarms = missed = 0
    wrong_cases = 0
    print(f"{'gradients':>9} {'buffers':>9}  {'training':58} said")
    cases = [*CASES, *HARD, *MODELS]
    for case in cases:
        truth = measure(case)
        found, _, untrained = compare(case)
        said = wrong(found, untrained)
        named = any(case.operator in one and case.module in one for one in said)
        right = bool(said) == truth.wrong and (named or not truth.wrong)
        mistakes += not right
        alarms += bool(said) and not truth.wrong
        missed += truth.wrong and not said
        wrong_cases += truth.wrong
        first = said[0] if said else "the same"
        print(
            f"{truth.gradients:9.1e} {truth.buffers:9.1e}  {case.name[:58]:58} "
            f"{'' if right else 'MISTAKE: '}{first}"
        )
    print(
        f"{len(cases)} trainings, {wrong_cases} of them wrong by their gradients or buffers; "
        f"{mistakes} answers mistaken: {alarms} false alarms, {missed} missed, the rest named "
        "another operator or module"
    )
    return int(mistakes > 0)


def accuracy_cases(groups: Iterable[str]) -> int:
    """Those whose recomputes are counted."""
    mistakes = alarms = untrue = wrong_cases = 0
    cases = [case for group in groups for case in GROUPS[group]]
    print(f"{'apart':>9} {'recomputes':>10}  {'case':34} {'truth':22} said")
    for case in cases:
        found = look_at(case)
        mistakes += not found.right
        alarms += bool(found.said) and not found.right
        untrue += found.apart is None
        wrong_cases += found.wrong
        apart = "-" if found.apart is None else f"{found.apart:.1e}"
        said = next(iter([*found.said, *found.untold]), "the same")
        print(
            f"{apart:>9} {found.recomputes:10}  {case.name:34} {found.source:22} "
            f"{'' if found.right else 'MISTAKE: '}{said}",
            flush=True,
        )
    print(
        f"{len(cases)} cases, {wrong_cases} of them wrong by their gradients or buffers, {untrue} "
        f"without truth; {mistakes} answers mistaken, {alarms} of them false alarms"
    )
    return int(mistakes > 0)


if __name__ == "__main__":
    sys.exit(main())
