"""`recompute_scan.fit` in trainings of all kinds: memory, times, losses, steps until settled.

Each model of `tests/plan/scripts.py` with one process is trained without checkpoints, then with
`fit` and a limit at 30, 50, 70 and 90 % between all layers recomputed and none. Losses of 200 steps
are compared to the bit. `tests/plan/oracle.py` measures the peak. Step times are medians over pairs
of neighboring steps, each arrangement in turn with the model's own switch: no layer, all, every
second and every third. The step is predicted as a share of one with every layer recomputed.

  python -m benchmarks fit moe lora         some models
  python -m benchmarks fit --bytes          no times

The status is 1 where a peak is over its limit, where losses differ, where bytes are off by 2 % or a
step by 8 %, or where a simple arrangement that fits is faster by 2 %.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
import torch
from tests.plan.oracle import peak_of
from tests.plan.scripts import CASES, Step, Switched, arrange, build

import recompute_scan
from benchmarks._frame import Table, benchmark, in_turn, words
from benchmarks._machine import processor
from recompute_scan.fitting.control import Fitted

BUDGETS = (0.3, 0.5, 0.7, 0.9)
_BYTES, _STEP_WORST, _CHANCE = 0.02, 0.08, 0.02
_LOSSES = 200


@dataclass(frozen=True)
class Row:
    """One training with fit beside what was measured of it; shares are of all recomputed."""

    case: str
    budget: float
    peak: float
    bytes_off: float
    equal: bool
    steps: int
    share: float | None = None
    predicted: float | None = None
    best: float | None = None

    @property
    def faults(self) -> list[str]:
        """What is not as it has to be."""
        found = ["over the limit"] * (self.peak > 1) + ["losses"] * (not self.equal)
        found += ["bytes"] * (abs(self.bytes_off) > _BYTES)
        if self.share and self.predicted and self.best:
            found += ["step"] * (abs(self.predicted / self.share - 1) > _STEP_WORST)
            found += ["slower"] * (self.share > self.best * (1 + _CHANCE))
        return found


def trained(name: str, limit: int | None) -> tuple[Switched, Step, list[str], int]:
    """The model after some steps without its checkpoints, what it gave, and when it settled."""
    model, step = build(CASES[name])
    model.on = {}
    given: list[str] = []
    hook = model.register_forward_hook(lambda *call: given.append(_bits(call[-1])))
    if limit is not None:
        recompute_scan.fit(model, limit, quiet=True)
    control, settled = recompute_scan.fitted(model), 0
    for done in range(1, _LOSSES + 1):
        step()
        settled = settled or done * (control is not None and control.settled)
    hook.remove()
    return model, step, given, settled


def _bits(out: Any) -> str:
    return str(out.detach().double().sum().item().hex())


def row_of(name: str, part: float, ends: tuple[int, int], plain: list[str], turns: int) -> Row:
    """One model with one limit."""
    least, most = ends
    limit = round(least + part * (most - least))
    model, step, given, settled = trained(name, limit)
    control = recompute_scan.fitted(model)
    assert control is not None, "it has layers"
    plan = control.plan
    assert plan is not None, f"{name} did not settle: {control.failure}"
    peak = peak_of(model, step)
    names = model.names()
    rivals = {"none": "none", "all": "all", "second": ",".join(names[::2])}
    rivals["third"] = ",".join(names[::3])
    times = _times(model, step, control, rivals, turns)
    fits = {way: _peak_with(model, step, control, one) <= limit for way, one in rivals.items()}
    control.stop()
    row = Row(
        name,
        part,
        peak / limit,
        plan.plan.peak_bytes / peak - 1,
        given == plain,
        settled,
    )
    if not turns:
        return row
    shares = {
        way: median([ms / other for ms, other in zip(took, times["all"], strict=True)])
        for way, took in times.items()
    }
    return Row(
        **vars(row)
        | {
            "share": shares["fit"],
            "predicted": plan.plan.step_ms / plan.today.step_ms,
            "best": min(shares[way] for way, fit in fits.items() if fit or way == "all"),
        }
    )


def _times(
    model: Switched, step: Step, control: Fitted, rivals: dict[str, str], turns: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in ("fit", *rivals)}
    for way in in_turn(list(found), turns):
        _arranged(model, control, rivals.get(way))
        step()
        for _ in range(2):
            began = time.process_time()
            step()
            found[way].append(time.process_time() - began)
    _arranged(model, control, None)
    return found


def _arranged(model: Switched, control: Fitted, rival: str | None) -> None:
    """Fit's arrangement, or the model's own switch."""
    control._switch.active = rival is None
    if rival is None:
        model.on = {}
    else:
        model.on = {
            name: [] for name in model.names() if rival == "all" or name in rival.split(",")
        }


def _peak_with(model: Switched, step: Step, control: Fitted, rival: str) -> int:
    _arranged(model, control, rival)
    return peak_of(model, step)


@benchmark
@words("names")
@click.option("--turns", default=12, help="Times that every arrangement has its turn.")
@click.option("--bytes", "only_bytes", is_flag=True, help="Only peaks and losses.")
def main(names: Sequence[str], turns: int, only_bytes: bool) -> int:
    known = [name for name, case in CASES.items() if case.ranks == 1]
    if other := set(names) - set(known):
        raise click.UsageError(f"{', '.join(sorted(other))}: not among {', '.join(known)}")
    torch.set_num_threads(1)
    print(f"{processor()}\n", flush=True)
    table = Table(
        "model < | budget >.0% | peak / limit >.3f | bytes off >+.2% | losses < | settled in steps "
        ">d | step / all recomputed >.3f | predicted >.3f | best simple >.3f | <",
        markdown=True,
    )
    rows = []
    for name in names or known:
        model, step, plain, _ = trained(name, None)
        arrange(model, "all")
        least = peak_of(model, step)
        arrange(model, "none")
        ends = least, peak_of(model, step)
        for part in BUDGETS:
            row = row_of(name, part, ends, plain, 0 if only_bytes else turns)
            rows.append(row)
            equal = "equal" if row.equal else "differ"
            sizes = (row.peak, row.bytes_off, equal, row.steps)
            shares = (row.share, row.predicted, row.best)
            table.row(row.case, row.budget, *sizes, *shares, ", ".join(row.faults))
    print(f"\n{summary(rows)}")
    return 1 if any(row.faults for row in rows) else 0


def summary(rows: list[Row]) -> str:
    """What the rows come to."""
    off = [abs(r.predicted / r.share - 1) for r in rows if r.predicted and r.share]
    slower = sum("slower" in row.faults for row in rows)
    text = (
        f"{len({row.case for row in rows})} models, {len(rows)} trainings. Over the limit: "
        f"{sum(row.peak > 1 for row in rows)}. Other losses: {sum(not row.equal for row in rows)}. "
        f"Bytes off by at most {max(abs(row.bytes_off) for row in rows):.2%}."
    )
    if off:
        text += (
            f" Step off by {median(off):.1%} (median), {max(off):.1%} (worst). Slower than the "
            f"best simple one that fits: {slower}."
        )
    return f"{text}\nLoad of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
