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
from recompute_scan.result import Checkpoint, Result
from recompute_scan.run_info import accounts_in
from recompute_scan.verification import Trial, verified

_ROUNDS = 2
_FOLDER = "verify"


def verify(
    result: Result,
    options: RunOptions,
    nproc_per_node: int | None,
    *,
    without_checkpointing: bool,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """The result with what was measured.

    The run that gave the result counts as the first of the unchanged ones; then come the fix,
    no checkpoints (where asked for), and all of them once more. The first run of each leaves a
    trace too. What the runs print goes to ``output.txt`` beside their accounts, in
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
        ways["with-the-fix"] = replace(options, removals=removals)
    if without_checkpointing:
        ways["without-checkpointing"] = replace(options, without_checkpointing=True)
    trials: dict[str, list[Trial]] = {name: [] for name in ways}
    before = [Trial(accounts_in(options.output), result=result)]
    for number in range(1, _ROUNDS + 1) if ways else ():
        order = dict(ways) if number == 1 else {"unchanged": options, **ways}
        for name, way in order.items():
            done = trials.get(name, before)
            if done and done[-1].exit_status:  # what failed once is not tried again
                continue
            on_progress(f"measuring {name.replace('-', ' ')}, run {number} of {_ROUNDS}")
            done.append(_run(name, number, way, nproc_per_node))
    after, without = (trials.get(name, []) for name in ("with-the-fix", "without-checkpointing"))
    return verified(result, removed, before, after, without)


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
