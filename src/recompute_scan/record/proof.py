"""Rehearses a script, plans, proves the plan in memory, and takes back what does not hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.advise.choice import RunFacts
from recompute_scan.advise.settings import setting_for
from recompute_scan.cost.arrangement import Choices
from recompute_scan.cost.plan import (
    WAYS,
    WAYS_ON_DEVICE,
    Planner,
    Wish,
    arm_of_way,
    steps_together,
    taken,
)
from recompute_scan.errors import RunError
from recompute_scan.files import content
from recompute_scan.intervals import FEWEST_PAIRS, pair_interval
from recompute_scan.progress import Pieces, telling
from recompute_scan.record.options import RunOptions
from recompute_scan.record.rehearsal import steps_needed, warmup_steps
from recompute_scan.record.trial import run_trial
from recompute_scan.result import ActivationPlan, PlanOutcome, PlanPoint, PlanProof, Result
from recompute_scan.result.run_record import (
    ArmWanted,
    Rehearsal,
    Way,
    read_rehearsals,
    run_records_in,
)

_FOLDER = "plan"
# What a plan cannot do without; the rest is left out where the script fails with it: there may be
# too little memory for it, an operator may write into a result that a selective checkpoint keeps,
# and a part may leave something for the rest of its module.
_NEEDED: tuple[Way, ...] = ("today", "recompute")
_MOST_TRIES = 3
# What the measured peak may differ by from the computed one: a recompute's own small tensors.
_SMALL = 0.02


class Asked(Struct, frozen=True):
    """What a person wants of a plan: the limit, and whether to prove it."""

    wish: Wish
    verify: bool = True


def add_plan(
    result: Result,
    options: RunOptions,
    nproc_per_node: int | None,
    asked: Asked,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """The result with the plan, proven where that is wanted.

    Args:
        result: What the recorded run showed.
        options: How it was recorded.
        nproc_per_node: How many processes it was started in; ``None`` for one.
        asked: What is wanted.
        on_progress: Called with a line for the person before each run.

    Raises:
        RunError: There is nothing to plan (``E331``), or nothing keeps the limit (``E332``).
    """
    runs = Rehearsals(options, nproc_per_node, Pieces(3 if asked.verify else 2))
    on_progress("rehearsing: as it is, without checkpoints, with all of them")
    ranks = runs.rehearse()
    rehearsal = ranks[0]
    if len({tuple(one.module for one in rank.candidates) for rank in ranks}) > 1:
        raise RunError(
            "E331",
            "The ranks have different modules, and one plan is made for all.",
            hint="plan with as many ranks as hold one stage of the model",
        )
    if not any(run.backward >= 0 for run in rehearsal.runs):
        raise RunError(
            "E331",
            "There is no module whose checkpoint could be planned.",
            why=" ".join(
                rehearsal.remarks
                or ("the script checkpoints no module, and its model has no list of like blocks",)
            ),
            hint="put the layers into an nn.ModuleList or nn.Sequential",
        )
    planner = Planner(ranks, asked.wish)
    chosen = planner.best()
    plan = planner.plan(chosen)
    less = 0
    # What the script does today needs no proof.
    for _ in range(_MOST_TRIES if asked.verify and not plan.as_today else 0):
        on_progress("proving the plan: its step time and memory, in turn with today's")
        proof = _proven(runs, planner, chosen, plan)
        plan = replace(plan, proof=proof)
        over = (proof.peak_bytes or 0) - (plan.budget_bytes or 0)
        if proof.outcome != "does-not-fit" or plan.budget_bytes is None:
            break
        less += over
        try:
            again = planner.best(less)
        except RunError:
            break
        chosen, plan = again, replace(planner.plan(again), proof=proof)
    facts = RunFacts(result.environment, sharded="fsdp" in str(result.environment).lower())
    setting, code = setting_for(plan.modules, result.regions, facts, plan.operators)
    return replace(result, plan=replace(plan, setting=setting, code=code))


def _proven(runs: Rehearsals, planner: Planner, chosen: Choices, plan: ActivationPlan) -> PlanProof:
    names = tuple(name for one in plan.modules for name in one.checkpointed_names)
    selective = tuple(one.module for one in plan.modules if one.selective)
    offloaded = tuple(one.module for one in plan.modules if one.offloaded)
    try:
        wanted = ArmWanted("chosen", names, selective, plan.operators, offloaded)
        ranks = runs.run("proof", (ArmWanted("today"), wanted))
    except RunError:
        return PlanProof("failed")
    before, peak = (
        max(taken(arm_of_way(one.arms, way)) for one in ranks) for way in ("today", "chosen")
    )
    steps = steps_together(ranks)
    pairs = list(zip(steps["today"], steps["chosen"], strict=False))
    today, step = (median(each) for each in zip(*pairs, strict=True))
    low, high = pair_interval(pairs) if len(pairs) >= FEWEST_PAIRS else (None, None)
    proof = PlanProof(
        outcome="unclear",
        today_step_ms=today,
        step_ms=step,
        predicted_step_ms=plan.plan.step_ms / planner.today.step_ms * today,
        ratio_low=low,
        ratio_high=high,
        peak_bytes=peak,
        predicted_bytes=planner.point(chosen).peak_bytes,
        ranks=len(ranks),
        today_bytes=before,
    )
    return replace(proof, outcome=_outcome(plan, planner.today, proof))


def _outcome(plan: ActivationPlan, today: PlanPoint, proof: PlanProof) -> PlanOutcome:
    assert proof.peak_bytes is not None
    if plan.budget_bytes is not None and proof.peak_bytes > plan.budget_bytes:
        return "does-not-fit"
    if plan.budget_bytes is not None and today.peak_bytes > plan.budget_bytes:
        return "fits"
    if plan.limit_ms is not None:
        fits = proof.step_ms is not None and proof.step_ms <= plan.limit_ms
        return "fits" if fits else "does-not-fit"
    if proof.ratio_low is None or proof.ratio_high is None:
        return "unclear"
    if proof.ratio_high < 1:
        return "helps"
    if proof.ratio_low > 1:
        return "slower"
    return "no-gain" if proof.ratio_high - proof.ratio_low < 2 * _SMALL else "unclear"


class Rehearsals:
    """Runs of the script whose arrangement of checkpoints changes from step to step."""

    def __init__(self, options: RunOptions, nproc_per_node: int | None, pieces: Pieces) -> None:
        self._pieces = pieces
        self._options = options
        self._nproc_per_node = nproc_per_node
        self._number = 0
        self._failed: set[Way | None] = set()

    def rehearse(self) -> tuple[Rehearsal, ...]:
        """What the ranks show of the arrangements that a plan is made from, by rank.

        On a CPU there are two runs. How a process lies in memory makes some arrangements a few
        percent slower from its first step to its last, and others in the next process.

        Raises:
            RunError: One of the ranks left nothing (``E333``).
        """
        on_device = any(one.device == "cuda" for one in run_records_in(self._options.output))
        ways = WAYS_ON_DEVICE if on_device else WAYS
        wanted, ranks = self._first_that_runs(ways)
        if ranks[0].device != "cpu":
            return ranks
        again = self.run("rehearsal", wanted)
        return tuple(one.joined(other) for one, other in zip(ranks, again, strict=True))

    def _first_that_runs(
        self, ways: Sequence[Way]
    ) -> tuple[tuple[ArmWanted, ...], tuple[Rehearsal, ...]]:
        while True:
            wanted = tuple(map(ArmWanted, ways))
            try:
                return wanted, self.run("rehearsal", wanted)
            except RunError:
                others = set(ways).difference(_NEEDED)
                if not others:
                    raise
            failed = others & self._failed or others
            ways = [way for way in ways if way not in failed]

    def run(self, name: str, arms: tuple[ArmWanted, ...]) -> tuple[Rehearsal, ...]:
        """What the ranks have left, by rank.

        Raises:
            RunError: One of them left nothing (``E333``).
        """
        self._number += 1
        folder = self._options.output / _FOLDER / f"{name}-{self._number}"
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier plan left
        folder.mkdir(parents=True)
        options = replace(
            self._options,
            output=folder,
            steps=0,
            warmup=warmup_steps(len(arms)),
            timing_steps=steps_needed(max(2, self._options.timing_steps), len(arms)),
            measure=True,
            arms=arms,
            keep_going=False,
            fidelity=False,
        )
        with telling(self._pieces.share):
            status = run_trial(options, self._nproc_per_node, folder / "output.txt")
        self._pieces.done()
        found = read_rehearsals(folder)
        self._failed = {one.failed for one in found}
        complete = tuple(
            one for one in found if one.failed is None and all(arm.steps_ms for arm in one.arms)
        )
        if len(complete) < (self._nproc_per_node or 1):
            raise RunError(
                "E333",
                "The script failed with its checkpoints rearranged.",
                why=_why(folder, status, options),
                hint=f"{folder / 'output.txt'} has what it printed",
            )
        return complete


def _why(folder: Path, status: int, options: RunOptions) -> str:
    if status == 0:
        needed = options.warmup + options.timing_steps
        return f"it ended before {needed} steps: let it make as many, or give fewer --timing-steps"
    try:
        lines = content(folder / "output.txt").decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"it ended with status {status}" + (f": {lines[-1][:200]}" if lines else "")
