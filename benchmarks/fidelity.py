"""Gradients with and without checkpoints, beside what is said of a compared step.

The truth is measured: each training takes one step with its checkpoints and one without them, from
the same seeds. What is said is what `recompute-scan run` would say of a step that it compares.

  python -m benchmarks fidelity                               trainings that are wrong or look so
  python -m benchmarks fidelity --group core,distributed      the cases of `accuracy`

The status is 1 where the two disagree, or where the operator or module named is another one.
"""

import logging
import warnings
from collections.abc import Sequence

import click
import torch
from tests.cases.groups import GROUPS, chosen
from tests.fidelity.accuracy_cases import look_at
from tests.fidelity.cases import CASES
from tests.fidelity.compare import compare, wrong
from tests.fidelity.hard_cases import HARD
from tests.fidelity.models import MODELS
from tests.fidelity.truth import measure

from benchmarks._frame import Table, benchmark, some, wanted, words
from benchmarks._machine import machine


@benchmark
@words()
@some("--group", [*GROUPS, "all", "none"], default=["none"], text="Groups of `accuracy`'s cases.")
@click.option("--device", default="cpu", help="Of torch, where trainings make what they need.")
def main(words: Sequence[str], group: Sequence[str], device: str) -> int:
    warnings.simplefilter("ignore")
    logging.disable()
    print(f"{machine('torch', 'transformers')}, {device}")
    torch.set_default_device(device)
    if "none" in group:
        return look_alikes(words)
    return accuracy_cases([*GROUPS] if "all" in group else group, words)


def look_alikes(words: Sequence[str]) -> int:
    """Trainings that are wrong, or right and look suspicious."""
    mistakes = alarms = missed = wrong_cases = unable = 0
    table = Table({"gradients": ">9.1e", "buffers": ">9.1e", "training": "<58", "said": "<"})
    cases = [case for case in (*CASES, *HARD, *MODELS) if wanted(case.name, words)]
    for case in cases:
        try:
            truth = measure(case)
        except Exception as error:
            unable += 1  # it makes what it needs on the CPU, where another device was asked for
            table.row(None, None, case.name[:58], f"CANNOT RUN: {error}"[:99])
            continue
        found, _, untrained = compare(case)
        said = wrong(found, untrained)
        named = any(case.operator in one and case.module in one for one in said)
        right = bool(said) == truth.wrong and (named or not truth.wrong)
        mistakes += not right
        alarms += bool(said) and not truth.wrong
        missed += truth.wrong and not said
        wrong_cases += truth.wrong
        shown = ("" if right else "MISTAKE: ") + next(iter(said), "the same")
        table.row(truth.gradients, truth.buffers, case.name[:58], shown)
    print(
        f"{len(cases) - unable} trainings, {wrong_cases} of them wrong by their gradients or "
        f"buffers, {unable} cannot run here; {mistakes} answers mistaken: {alarms} false alarms, "
        f"{missed} missed, the rest named another operator or module"
    )
    return int(mistakes > 0 or (unable > 0 and torch.get_default_device().type == "cpu"))


def accuracy_cases(groups: Sequence[str], words: Sequence[str]) -> int:
    """Cases whose recomputes are counted."""
    mistakes = alarms = untrue = wrong_cases = 0
    cases = [case for case in chosen(groups) if wanted(case.name, words)]
    columns = {"apart": ">9.1e", "recomputes": ">10", "case": "<34", "truth": "<22", "said": "<"}
    table = Table(columns)
    for case in cases:
        found = look_at(case)
        mistakes += not found.right
        alarms += bool(found.said) and not found.right
        untrue += found.apart is None
        wrong_cases += found.wrong
        said = next(iter([*found.said, *found.untold]), "the same")
        shown = ("" if found.right else "MISTAKE: ") + said
        table.row(found.apart, found.recomputes, case.name, found.source, shown)
    print(
        f"{len(cases)} cases, {wrong_cases} of them wrong by their gradients or buffers, {untrue} "
        f"without truth; {mistakes} answers mistaken, {alarms} of them false alarms"
    )
    return int(mistakes > 0)
