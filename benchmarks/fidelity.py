"""Trainings with checkpoints: how far their gradients are from those without, and what is said.

    python benchmarks/fidelity.py

The truth is measured: each training takes one step with its checkpoints and one without them, from
the same seeds. What is said is what `recompute-scan run` would say of a step that it compares.
Exits with 1 where the two disagree, or where the operator or module named is not the right one.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import processor, versions
from tests.fidelity.cases import CASES
from tests.fidelity.compare import compare, wrong
from tests.fidelity.hard_cases import HARD
from tests.fidelity.models import MODELS
from tests.fidelity.truth import measure


def main() -> int:
    """Print the table; 1 where an answer is wrong."""
    warnings.simplefilter("ignore")
    mistakes = alarms = missed = 0
    wrong_cases = 0
    print(f"{processor()}, {versions(('torch', 'transformers'))}")
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


if __name__ == "__main__":
    sys.exit(main())
