"""Plans for scripts of all kinds, against what the planned arrangements really take.

Each script is rehearsed once, as `recompute-scan plan` does it. Then a plan is made for budgets at
30, 50, 70 and 90 % between all recomputed and nothing recomputed, and ``tests/plan/oracle.py`` runs
the script with it, by the script's own switch and without recompute-scan, in turn with all layers,
no layer and every second layer checkpointed. Where there are few layers, every arrangement is tried
to see that the plan's is the fastest that fits.

A step is predicted as a share of the script's step as it is, and compared with that share: the
median over pairs of neighboring steps, by the processor time of the oracle's process where there
is one, and by the wall clock where there are two, which wait for each other. The script as it is
runs a second time among the rest, which says what a measured share can be off by.

glibc gives memory at the heap's end back to the system, and gets it again with the next step, page
by page. No GPU does so: both processes therefore run with an allocator that keeps its memory.

  python -m benchmarks plan moe lora        some scripts
  python -m benchmarks plan --bytes         only what arrangements hold, of all choices

The status is 1 where a plan is over its budget, where its bytes or its step are too far off, or
where a simple arrangement is faster.
"""

import itertools
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from tests.plan.oracle import peak_of
from tests.plan.rehearsed import all_choices, arranged, rehearse, some_choices
from tests.plan.scripts import CASES, PlanCase, arrange, build

from benchmarks._frame import Table, benchmark, told, words
from benchmarks._machine import processor
from recompute_scan.cost.arrangement import PART, RECOMPUTE, SELECTIVE, Arrangements, Choices
from recompute_scan.cost.plan import Planner, Wish
from recompute_scan.result.run_record import whole_places

BUDGETS = (0.3, 0.5, 0.7, 0.9)
_MOST_TRIED = 3**8
_DRAWN = 11
_BYTES, _STEP_MEDIAN, _STEP_WORST = 0.03, 0.03, 0.08
# What the fastest of several measured medians may be faster by chance.
_CHANCE = 0.02
# Of the oracle: in some every arrangement is a few percent faster or slower than in others.
_PROCESSES = 4
# For glibc: what is free stays with the process.
_KEEPING = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}


@dataclass(frozen=True)
class Row:
    """One plan beside what was measured of it."""

    case: str
    budget: float
    layers: str
    budget_bytes: int
    predicted_bytes: int
    peak_bytes: int
    predicted: float
    share: float
    rival: float
    again: float
    optimal: bool | None

    @property
    def bytes_off(self) -> float:
        return self.predicted_bytes / self.peak_bytes - 1

    @property
    def step_off(self) -> float:
        return self.predicted / self.share - 1

    @property
    def faults(self) -> list[str]:
        """What is not as it has to be."""
        found = []
        if self.peak_bytes > self.budget_bytes:
            found.append("over budget")
        if abs(self.bytes_off) > _BYTES:
            found.append("bytes")
        if abs(self.step_off) > _STEP_WORST:
            found.append("step")
        if self.share > self.rival * (1 + _CHANCE):
            found.append("slower than a simple one")
        if self.optimal is False:
            found.append("not optimal")
        return found


def show_bytes(name: str, folder: Path, table: Table) -> bool:
    """Print by how much what was worked out is off, arrangement by arrangement."""
    model = all_choices(name, folder)
    script, step = build(CASES[name])
    step()
    off = []
    for choices in some_choices(model):
        arrange(script, arranged(model, choices))
        off.append(model.peak(choices) / peak_of(script, step) - 1)
    table.row(name, *off, *[""] * (_DRAWN - len(off)))
    return max(map(abs, off)) <= _BYTES


def rows_of(name: str, steps: int, folder: Path) -> list[Row]:
    """All plans for one script."""
    case = CASES[name]
    ranks = rehearse(name, steps, folder)
    planner = Planner(ranks, Wish("bytes", 0, ""))
    model = planner.arrangements
    least, most = model.peak(model.everything), model.peak(model.nothing)
    budgets = [round(least + part * (most - least)) for part in BUDGETS]
    chosen = [model.solve(budget=budget) for budget in budgets]
    names = [model.candidates[place].module for place in whole_places(model.candidates)]
    plans = [arranged(model, _known(one)) for one in chosen]
    simple = ["all", "none", ",".join(names[::2])]
    tried = [case.today, case.today, *simple, *plans]
    shown = _oracle(name, case, steps, tried)
    times = shown["busy" if case.ranks == 1 else "wall"]
    shares = [_share(times[0], one) for one in times]
    found = []
    for place, (part, budget, choice) in enumerate(zip(BUDGETS, budgets, chosen, strict=True)):
        at = 2 + len(simple) + place
        fitting = [shares[n] for n in (2, 3, 4) if shown["peaks"][n] <= budget]
        found.append(
            Row(
                name,
                part,
                f"{_counts(_known(choice), len(names))}/{len(names)}",
                budget,
                model.peak(_known(choice)),
                shown["peaks"][at],
                model.step_ms(_known(choice)) / planner.today.step_ms,
                shares[at],
                min(fitting, default=float("inf")),
                shares[1],
                _optimal(model, _known(choice), budget),
            )
        )
    return found


def _share(before: list[float], after: list[float]) -> float:
    """What the steps of one arrangement take of those of another, pair by pair."""
    return median([one / other for other, one in zip(before, after, strict=True)])


def _counts(choices: Choices, modules: int) -> str:
    whole, partly = (int((choices[:modules] == how).sum()) for how in (RECOMPUTE, SELECTIVE))
    parts = int((choices == PART).sum())
    return f"{whole}" + f"+{partly}~" * bool(partly) + f"+{parts} parts" * bool(parts)


def _known(choice: Choices | None) -> Choices:
    assert choice is not None, "a budget between the two ends can be kept"
    return choice


def _optimal(model: Arrangements, chosen: Choices, budget: int) -> bool | None:
    """Whether no arrangement that fits is faster; ``None`` where there are too many to try."""
    options = [model.options(place) for place in range(len(model.candidates))]
    if math.prod(map(len, options)) > _MOST_TRIED:
        return None
    every = (model.followed(np.array(one, np.int8)) for one in itertools.product(*options))
    best = min(model.step_ms(one) for one in every if model.peak(one) <= budget)
    return model.step_ms(chosen) <= best * (1 + 1e-9)


def _oracle(name: str, case: PlanCase, steps: int, tried: list[str]) -> Any:
    """Peaks, and step times of all its processes one behind the other."""
    each = [_oracle_once(name, case, -(-steps // _PROCESSES), tried) for _ in range(_PROCESSES)]
    assert all(one["peaks"] == each[0]["peaks"] for one in each)
    clocks = ("busy", "wall")
    return each[0] | {
        clock: [
            [ms for part in parts for ms in part]
            for parts in zip(*(one[clock] for one in each), strict=True)
        ]
        for clock in clocks
    }


def _oracle_once(name: str, case: PlanCase, steps: int, tried: list[str]) -> Any:
    command = [sys.executable]
    if case.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={case.ranks}"]
    return told([*command, "-m", "tests.plan.oracle", name, str(steps), *tried])


def summary(rows: list[Row]) -> str:
    """What the rows come to."""
    steps = [abs(row.step_off) for row in rows]
    tried = [row.optimal for row in rows if row.optimal is not None]
    again = [abs(one - 1) for one in {row.case: row.again for row in rows}.values()]
    return (
        f"{len({row.case for row in rows})} scripts, {len(rows)} plans. Within the budget: "
        f"{sum(row.peak_bytes <= row.budget_bytes for row in rows)}. Bytes off by at most "
        f"{max(abs(row.bytes_off) for row in rows):.2%}. Step off by {median(steps):.1%} (median), "
        f"{max(steps):.1%} (worst). Slower than the best simple one that fits: "
        f"{sum(row.share > row.rival * (1 + _CHANCE) for row in rows)}. Optimal of all that were "
        f"tried: {sum(tried)} of {len(tried)}. The same steps a second time: off by "
        f"{median(again):.1%} (median), {max(again):.1%} (worst).\n"
        f"Load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    )


@benchmark
@words("names")
@click.option("--steps", default=12, help="Timed steps of each arrangement.")
@click.option("--bytes", "only_bytes", is_flag=True, help="Only what arrangements hold.")
@click.option("--malloc", is_flag=True, help="With the system's allocator as it is.")
def main(names: Sequence[str], steps: int, only_bytes: bool, malloc: bool) -> int:
    if not malloc:
        os.environ |= _KEEPING
    if other := set(names) - set(CASES):
        raise click.UsageError(f"{', '.join(sorted(other))}: not among {', '.join(CASES)}")
    print(f"{processor()}\n", flush=True)
    if only_bytes:
        heads = ["none", "all", "all selectively", *(f"mixed {n}" for n in range(1, 6))]
        heads += [f"with parts {n}" for n in range(1, _DRAWN - 7)]
        table = Table({"script": "<", **dict.fromkeys(heads, ">+.2%")}, markdown=True)
        alone = [name for name in names or CASES if CASES[name].ranks == 1]
        with tempfile.TemporaryDirectory() as folder:
            exact = [show_bytes(name, Path(folder), table) for name in alone]
        return 0 if all(exact) else 1
    table = Table(
        "script < | budget >.0% | recomputed (~ selectively) < | peak / budget >.3f | bytes off "
        ">+.2% | step as a share of today's: predicted >.3f | measured >.3f | best simple >.3f | "
        "<",
        markdown=True,
    )
    rows: list[Row] = []
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(name, steps, Path(folder))
        for row in rows[-len(BUDGETS) :]:
            sizes = (row.peak_bytes / row.budget_bytes, row.bytes_off)
            shares = (row.predicted, row.share, row.rival)
            table.row(row.case, row.budget, row.layers, *sizes, *shares, ", ".join(row.faults))
    print(f"\n{summary(rows)}")
    held = not any({"over budget", "bytes", "not optimal"} & set(row.faults) for row in rows)
    good = held and median(abs(row.step_off) for row in rows) <= _STEP_MEDIAN
    return 0 if good and not any(row.faults for row in rows) else 1
