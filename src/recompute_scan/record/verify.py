"""Run the script again to measure a change: the fix, a plan, or no checkpoints at all.

The fix is applied in memory, in turn with the unchanged script; where the times vary too much for
that, it is switched on and off from step to step. A plan starts with a rehearsal of several
arrangements of checkpoints; the plan that comes out of it is then measured in turn with today's,
and rejected if it exceeds the limit or is slower.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.advise.choice import RunFacts
from recompute_scan.advise.settings import setting_for
from recompute_scan.analysis.pipeline import analyse
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
from recompute_scan.errors import InputError, RunError
from recompute_scan.files import content
from recompute_scan.findings.registry import recommends_plan
from recompute_scan.intervals import FEWEST_PAIRS, pair_interval
from recompute_scan.progress import Pieces, reporting
from recompute_scan.record.children import run_trial
from recompute_scan.record.options import RemovalOptions, RunOptions
from recompute_scan.record.rehearsal import steps_needed, warmup_steps
from recompute_scan.result import (
    DOUBLED,
    ActivationPlan,
    Checkpoint,
    PlanOutcome,
    PlanPoint,
    PlanProof,
    Region,
    Result,
)
from recompute_scan.result.fidelity import read_sampled
from recompute_scan.result.run_record import (
    ArmWanted,
    Rehearsal,
    Way,
    read_rehearsals,
    run_records_in,
)
from recompute_scan.units import plural
from recompute_scan.verification import (
    Trial,
    Trials,
    named_regions,
    ran_out,
    verified,
    without_in_parts,
)

# While the times leave the outcome open, runs follow that switch the fix on and off; where the
# script does not bear that, more rounds.
_ROUNDS, _MOST_ROUNDS = 2, 6
_MOST_SWITCHING = 4
_UNCHANGED, _FIX, _WITHOUT = "unchanged", "with-the-fix", "without-checkpointing"
_AGAIN, _BARE = "first-step-unchanged", "first-step-without-checkpointing"
_PART = "first-step-without-some"
_PLAN, _SWITCHING = "with-the-plan", "switching-the-fix"


def verify(
    result: Result,
    options: RunOptions,
    nproc_per_node: int | None,
    *,
    without_checkpointing: bool,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """The result with what was measured.

    The run that gave the result counts as the first of the unchanged ones; then come the fix, the
    plan of RS301 with it, and no checkpoints (where asked for), and all of them once more, the
    other way round. While that leaves the outcome open, the script is run with the fix switched on
    and off from step to step; where that fails or times no steps, unchanged and with the fix again.
    The first run of each way but that leaves a trace too. Before them, two short runs, one without
    checkpoints, leave the gradients of the first step; where memory does not suffice for the
    latter, several that have some. The output of the runs goes to ``output.txt`` next to their run
    records, in ``verify/…`` below the run's folder.

    The options are the recorded run's, with ``measure`` on.
    """
    removed, planned = to_remove(result), planned_regions(result)
    removals = tuple(removal_of(checkpoint, result) for checkpoint in removed)
    ways = {_UNCHANGED: options}
    if removed:
        ways[_FIX] = fixed = replace(options, removals=removals)
        timed = 2 * options.timing_steps
        ways[_SWITCHING] = replace(fixed, switching=True, timing_steps=timed, steps=0)
    if planned:
        ways[_PLAN] = replace(options, removals=removals + plan_removals(planned, result))
    if without_checkpointing:
        ways[_WITHOUT] = replace(options, without_checkpointing=True)
    short = replace(options, steps=0, warmup=1, timing_steps=1)
    ways[_AGAIN] = short
    ways[_BARE] = replace(short, without_checkpointing=True)
    runs = _RoundsSoFar(result, removed, planned, ways, nproc_per_node, on_progress)
    in_turn = [name for name in (_UNCHANGED, _FIX, _PLAN, _WITHOUT) if name in ways]
    rounds = _ROUNDS if len(in_turn) > 1 else 0
    # the first of the rounds has been made
    runs.pieces = Pieces(2 + max(0, rounds * len(in_turn) - 1))
    with reporting(runs.pieces.share):
        for name in (_AGAIN, _BARE):
            runs.add(name, 1, "for its gradients")
        runs.bare_in_parts(short)
        for number in range(1, rounds + 1):
            # The other way around every second time, for machines that get slower and slower.
            for name in in_turn[1:] if number == 1 else reversed(in_turn):
                runs.add(name, number, f"round {number} of {_ROUNDS}")
    number = 0
    while runs.open and number < _MOST_SWITCHING and not runs.unpaired:
        number += 1
        runs.add(_SWITCHING, number, f"run {number} of up to {_MOST_SWITCHING} (the times vary)")
    number = _ROUNDS
    while runs.open and number < _MOST_ROUNDS and not runs.paired:
        number += 1
        for name in in_turn[:2] if number % 2 else reversed(in_turn[:2]):
            runs.add(name, number, f"round {number} (the times vary)")
    return runs.so_far


class _RoundsSoFar:
    """The runs of one verification, and their result so far."""

    def __init__(
        self,
        result: Result,
        removed: tuple[Checkpoint, ...],
        planned: tuple[Region, ...],
        ways: dict[str, RunOptions],
        nproc_per_node: int | None,
        on_progress: Callable[[str], None],
    ) -> None:
        self._result = result
        self._removed = removed
        self._planned = tuple(region.module or "" for region in planned)
        self._ways = ways
        self._nproc_per_node = nproc_per_node
        self._on_progress = on_progress
        self._trials: defaultdict[str, list[Trial]] = defaultdict(list)
        output = ways[_UNCHANGED].output
        first = Trial(run_records_in(output), result=result, gradients=read_sampled(output))
        self._trials[_UNCHANGED].append(first)
        self.pieces = Pieces(1)
        self._in_parts: int | None = None
        self.so_far = self._together()

    @property
    def open(self) -> bool:
        """Whether the times leave the outcome open.

        A step that is slower with fewer recomputes goes against the count: the machine has more
        likely changed its speed between the runs, until steps side by side show the same.
        """
        section = self.so_far.verified
        if section is None:
            return False
        return section.outcome == "unclear" or (section.outcome == "slower" and not section.pairs)

    @property
    def unpaired(self) -> bool:
        """Whether the last run that was to switch the fix on and off gave nothing to compare."""
        last = self._trials[_SWITCHING][-1:]
        return any(not (trial.came_through and trial.pairs) for trial in last)

    @property
    def paired(self) -> bool:
        """Whether runs that switched the fix on and off have given enough steps."""
        section = self.so_far.verified
        return section is not None and section.pairs > 0

    def add(self, name: str, number: int, which: str) -> None:
        """Run the script this way, unless it has failed so before."""
        if any(trial.exit_status for trial in self._trials[name][-1:]):
            return
        self._on_progress(f"measuring {name.replace('-', ' ')}, {which}")
        self._trials[name].append(_run(name, number, self._ways[name], self._nproc_per_node))
        self.pieces.done()
        self.so_far = self._together()

    def bare_in_parts(self, options: RunOptions) -> None:
        """Where without any checkpoint memory did not suffice: take them out in parts."""
        if not any(map(ran_out, self._trials[_BARE])):
            return

        def run(part: Sequence[Region], number: int) -> Trial:
            self._on_progress(
                f"measuring gradients without the checkpoints of {plural(len(part), 'block')}"
            )
            removals = plan_removals(part, self._result)
            without = replace(options, removals=removals)
            return _run(_PART, number, without, self._nproc_per_node)

        came, self._in_parts = without_in_parts(named_regions(self._result), run)
        if came:
            self._trials[_BARE] = came
            self.so_far = self._together()

    def _together(self) -> Result:
        runs = self._trials
        trials = Trials(
            before=runs[_UNCHANGED],
            after=runs[_FIX],
            without=runs[_WITHOUT],
            switching=runs[_SWITCHING],
            plan=runs[_PLAN],
            again=runs[_AGAIN],
            bare=runs[_BARE],
            in_parts=self._in_parts,
        )
        return verified(self._result, self._removed, trials, self._planned)


def to_remove(result: Result) -> tuple[Checkpoint, ...]:
    """The checkpoints that the fixes of the findings that cost time take out, each once.

    The cost of a doubled checkpoint around compiled code is not known, and so worth measuring.
    """
    found = [
        removed
        for finding in result.findings
        if finding.saving_ms or (finding.code == DOUBLED and finding.saving_ms is None)
        for removed in (finding.fix.removed if finding.fix else ())
    ]
    return tuple(dict.fromkeys(found))


def planned_regions(result: Result) -> tuple[Region, ...]:
    """The regions that the recommended plan takes the checkpoints from.

    None without such a plan, or where other regions' modules have the same names: a module that
    runs twice in a forward pass is two regions of one name.
    """
    memory = result.memory
    if not recommends_plan(result) or memory is None or memory.chosen is None:
        return ()
    ordinals = set(memory.plans[memory.chosen].regions)
    planned = [region for region in result.regions if region.ordinal in ordinals]
    others = {region.module for region in result.regions if region.ordinal not in ordinals}
    return () if {region.module for region in planned} & {None, *others} else tuple(planned)


def plan_removals(planned: Sequence[Region], result: Result) -> tuple[RemovalOptions, ...]:
    """How to find the checkpoints around these regions, and around no others."""
    modules: dict[Checkpoint, list[str]] = {}
    for region in planned:
        for checkpoint in region.checkpoints:
            modules.setdefault(checkpoint, []).append(region.module or "")
    return tuple(
        replace(removal_of(checkpoint, result), modules=tuple(names))
        for checkpoint, names in modules.items()
    )


def removal_of(checkpoint: Checkpoint, result: Result) -> RemovalOptions:
    """How to find the calls of this checkpoint; by its depth only where nothing else
    distinguishes it from another around the same block.
    """

    def looks(one: Checkpoint) -> tuple[str | None, str | None, str | None]:
        return one.mechanism, one.call_site, one.variant

    twins = any(
        other != checkpoint and looks(other) == looks(checkpoint)
        for region in result.regions
        if checkpoint in region.checkpoints
        for other in region.checkpoints
    )
    return RemovalOptions(
        mechanism=checkpoint.mechanism or "",
        site=checkpoint.call_site or "",
        variant=checkpoint.variant or "",
        depth=checkpoint.depth if twins else None,
    )


def _run(name: str, number: int, options: RunOptions, nproc_per_node: int | None) -> Trial:
    folder = _emptied(options.output / "verify" / f"{name}-{number}")
    # One trace a way is enough, and only the ways that differ from the first run need one.
    traced = number == 1 and options.steps > 0
    options = replace(
        options, output=folder, steps=options.steps if traced else 0, keep_going=False
    )
    status = run_trial(options, nproc_per_node, folder / "output.txt")
    records = run_records_in(folder)
    result = None
    if traced and any(record.trace is not None for record in records):
        with suppress(InputError):
            result = analyse([folder])
    return Trial(records, status, result, read_sampled(folder))


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# The arrangements that a plan needs; others are left out where the script fails with them: there
# may be too little memory, an operator may write into a result that a selective checkpoint keeps,
# and a part may leave something for the rest of its module.
_NEEDED: tuple[Way, ...] = ("today", "recompute")
_MOST_TRIES = 3
# Share by which the measured peak may differ from the computed one: small tensors of a recompute.
_SMALL = 0.02


class Asked(Struct, frozen=True):
    """A person's wishes for a plan: the limit, and whether to prove it."""

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
            hint="plan with the ranks of one pipeline stage only",
        )
    if not any(run.backward >= 0 for run in rehearsal.runs):
        raise RunError(
            "E331",
            "There is no module that a checkpoint could be planned for.",
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
    # Today's arrangement needs no proof.
    for _ in range(_MOST_TRIES if asked.verify and not plan.as_today else 0):
        on_progress("proving the plan: its step time and memory, in turn with today's")
        proof = _proven(runs, planner, chosen, plan)
        plan = replace(plan, proof=proof)
        fits = proof.outcome != "does-not-fit"
        if fits or plan.budget_bytes is None or proof.peak_bytes is None:
            break
        less += proof.peak_bytes - plan.budget_bytes
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
        return PlanProof("does-not-fit" if runs.ran_out else "failed")
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
    """Runs of the script that change the arrangement of checkpoints from step to step."""

    def __init__(self, options: RunOptions, nproc_per_node: int | None, pieces: Pieces) -> None:
        self._pieces = pieces
        self._options = options
        self._nproc_per_node = nproc_per_node
        self._number = 0
        self._failed: set[Way | None] = set()
        self._last = Path(), 0

    @property
    def ran_out(self) -> bool:
        folder, status = self._last
        return ran_out(Trial(run_records_in(folder), status))

    def rehearse(self) -> tuple[Rehearsal, ...]:
        """The rehearsals of the arrangements that a plan is made from, by rank.

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
        """The rehearsals that the ranks have written, by rank.

        Raises:
            RunError: One of them left nothing (``E333``).
        """
        self._number += 1
        folder = _emptied(self._options.output / "plan" / f"{name}-{self._number}")
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
        with reporting(self._pieces.share):
            status = run_trial(options, self._nproc_per_node, folder / "output.txt")
        self._pieces.done()
        found = read_rehearsals(folder)
        self._failed = {one.failed for one in found}
        self._last = folder, status
        complete = tuple(
            one for one in found if one.failed is None and all(arm.steps_ms for arm in one.arms)
        )
        if len(complete) < (self._nproc_per_node or 1):
            raise RunError(
                "E333",
                "The script failed when recompute-scan changed its checkpoints."
                if status
                else "The script is too short for a plan.",
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
