"""Rehearsals of the scripts, and arrangements of their checkpoints to try."""

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from recompute_scan.cost.arrangement import PART, SELECTIVE, Arrangements, Choices
from recompute_scan.cost.plan import arrangements
from recompute_scan.progress import Pieces
from recompute_scan.record.options import RunOptions
from recompute_scan.record.verify import Rehearsals
from recompute_scan.result.run_record import Rehearsal
from tests.plan.scripts import CASES

SCRIPT = Path(__file__).with_name("scripts.py").resolve()


def rehearse(name: str, steps: int, folder: Path) -> tuple[Rehearsal, ...]:
    """What each rank of the script has shown."""
    case = CASES[name]
    options = RunOptions(
        str(SCRIPT),
        False,
        (name,),
        folder,
        timing_steps=steps,
        timeout_s=300,
    )
    number = case.ranks if case.ranks > 1 else None
    return Rehearsals(options, number, Pieces(2)).rehearse()


def all_choices(name: str, folder: Path) -> Arrangements:
    """The script's arrangements, selective ones among them however long they took."""
    (shown,) = rehearse(name, 1, folder)
    steps = {"today": 10.0, "keep": 10.0, "recompute": 20.0, "parts": 19.0, "selective": 12.0}
    arms = tuple(replace(arm, steps_ms=(steps[arm.way],) * 8) for arm in shown.arms)
    return arrangements(replace(shown, arms=arms))


def some_choices(model: Arrangements) -> list[Choices]:
    """One of the three for all, mixtures of them, and some with parts alone."""
    number = len(model.candidates)
    random = np.random.default_rng(0)
    drawn = [*(np.full(number, how, np.int8) for how in range(3))]
    drawn += [*random.integers(0, 3, (5, number), np.int8)]
    parts = [n for n, one in enumerate(model.candidates) if one.part_of >= 0]
    for least in (0, 0, -2) if parts else ():
        one = random.integers(least, 2, number, np.int8).clip(0)
        one[parts] = random.integers(0, 2, len(parts), np.int8) * PART
        drawn.append(one)
    return [model.followed(one) for one in drawn]


def arranged(model: Arrangements, choices: Choices) -> str:
    """The names that ``plan_cases.arrange`` knows an arrangement by."""
    each = zip(model.candidates, choices, strict=True)
    named = [(n.module, how) for n, how in each if how and (n.part_of < 0 or how == PART)]
    return ",".join(f"{name}{'~' * int(how == SELECTIVE)}" for name, how in named) or "none"
