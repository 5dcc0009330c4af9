"""Run the script again with the fix applied in memory, and unchanged once more, in turn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from recompute_scan.errors import InputError
from recompute_scan.pipeline import analyse
from recompute_scan.record.bypass import Removal
from recompute_scan.record.runner import RunOptions
from recompute_scan.record.trial import run_trial
from recompute_scan.result import Checkpoint, Outcome, Result
from recompute_scan.run_info import accounts_in
from recompute_scan.verification import Trial, verified

# More rounds follow while the times leave the outcome open.
_ROUNDS, _MOST_ROUNDS = 2, 6
_FOLDER = "verify"
_FIX, _WITHOUT = "with-the-fix", "without-checkpointing"


def verify(
    result: Result,
    options: RunOptions,
    nproc_per_node: int | None,
    *,
    without_checkpointing: bool,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """The result with what was measured.

    The run that gave the result counts as the first of the unchanged ones; then come the fix and
    no checkpoints (where asked for), and all of them once more, the other way round. While that
    leaves the outcome open, the script is run unchanged and with the fix again. The first run of
    each leaves a trace too. What the runs print goes to ``output.txt`` beside their accounts, in
    ``verify/…`` below the run's folder.

    Args:
        result: What the recorded run showed.
        options: How it was recorded; ``measure`` was on.
        nproc_per_node: How many processes it was started in; ``None`` for one.
        without_checkpointing: Whether to run it without any checkpoint too.
        on_progress: Called with a line for the person before each run.
    """
    removed = to_remove(result)
    ways: dict[str, RunOptions] = {}
    if removed:
        removals = tuple(removal_of(checkpoint, result) for checkpoint in removed)
        ways[_FIX] = replace(options, removals=removals)
    if without_checkpointing:
        ways[_WITHOUT] = replace(options, without_checkpointing=True)
    trials: dict[str, list[Trial]] = {name: [] for name in ways}
    before = [Trial(accounts_in(options.output), result=result)]
    for number in range(1, _MOST_ROUNDS + 1) if ways else ():
        if number > _ROUNDS:
            if not removed or _outcome(result, removed, before, trials[_FIX]) != "unclear":
                break
            ways.pop(_WITHOUT, None)
        order = dict(ways) if number == 1 else {"unchanged": options, **ways}
        # The other way round every second time, for machines that get slower and slower.
        for name in list(order) if number % 2 else reversed(list(order)):
            done = trials.get(name, before)
            if done and done[-1].exit_status:  # what failed once is not tried again
                continue
            of = f"of {_ROUNDS}" if number <= _ROUNDS else "(the times vary)"
            on_progress(f"measuring {name.replace('-', ' ')}, round {number} {of}")
            done.append(_run(name, number, order[name], nproc_per_node))
    after, without = (trials.get(name, []) for name in (_FIX, _WITHOUT))
    return verified(result, removed, before, after, without)


def _outcome(
    result: Result, removed: tuple[Checkpoint, ...], before: list[Trial], after: list[Trial]
) -> Outcome | None:
    section = verified(result, removed, before, after, ()).verified
    return section.outcome if section else None


def to_remove(result: Result) -> tuple[Checkpoint, ...]:
    """The checkpoints that the fixes of the findings that cost time take out, each once."""
    found = [
        finding.fix.removes
        for finding in result.findings
        if finding.fix and finding.fix.removes and finding.saving_ms
    ]
    return tuple(dict.fromkeys(found))


def removal_of(checkpoint: Checkpoint, result: Result) -> Removal:
    """How to find the calls of this checkpoint; by its depth only where nothing else tells it
    from another round the same block.
    """

    def looks(one: Checkpoint) -> tuple[str | None, str | None, str | None]:
        return one.mechanism, one.call_site, one.variant

    twins = any(
        other != checkpoint and looks(other) == looks(checkpoint)
        for region in result.regions
        if checkpoint in region.checkpoints
        for other in region.checkpoints
    )
    return Removal(
        mechanism=checkpoint.mechanism or "",
        site=checkpoint.call_site or "",
        variant=checkpoint.variant or "",
        depth=checkpoint.depth if twins else None,
    )


def _run(name: str, number: int, options: RunOptions, nproc_per_node: int | None) -> Trial:
    folder = options.output / _FOLDER / f"{name}-{number}"
    shutil.rmtree(folder, ignore_errors=True)  # what an earlier verification left
    folder.mkdir(parents=True)
    # One trace a way is enough, and only the ways that differ from the first run need one.
    traced = number == 1
    options = replace(
        options, output=folder, steps=options.steps if traced else 0, keep_going=False
    )
    status = run_trial(options, nproc_per_node, folder / "output.txt")
    accounts = accounts_in(folder)
    result = None
    if traced and any(account.trace is not None for account in accounts):
        result = _analysed(folder)
    return Trial(accounts, status, result)


def _analysed(folder: Path) -> Result | None:
    try:
        return analyse([folder])
    except InputError:
        return None
