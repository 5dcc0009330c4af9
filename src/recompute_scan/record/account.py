"""One rank's account of its recording, once that is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from recompute_scan.crash import RankEnd
from recompute_scan.record.environment import environment
from recompute_scan.record.plan import COMMAND, Plan, Wording, shortfall
from recompute_scan.record.probe import Probe
from recompute_scan.record.recorder import Recorder
from recompute_scan.run_info import RunInfo


def account_of(
    recorder: Recorder,
    probe: Probe,
    plan: Plan,
    target: str,
    *,
    failure: str | None = None,
    status: int = 0,
    end: RankEnd | None = None,
    wording: Wording = COMMAND,
) -> RunInfo:
    """The account.

    Args:
        recorder: What was recorded.
        probe: What was seen of checkpoints.
        plan: What was wanted.
        target: What was recorded: the script as it was named, or ``-m`` and the module.
        failure: How it failed, one sentence; ``None`` where it did not.
        status: Exit status of the script.
        end: How it ended, where it failed.
        wording: How a person asked for the recording.
    """
    if not recorder.chosen:
        plan = replace(plan, steps=0)
    missing = recorder.failure or shortfall(plan, recorder.seen, wording)
    outcome: Literal["complete", "ended-early", "failed"] = "ended-early" if missing else "complete"
    message = missing
    if failure is not None:
        outcome = "failed"
        message = " ".join(part for part in (failure, missing) if part)
    ranks = recorder.ranks
    return RunInfo(
        bug=recorder.bug,
        rank=ranks.rank,
        world_size=ranks.world_size,
        status=outcome,
        exit_status=status,
        message=message,
        device=recorder.device,
        warmup_steps=recorder.warmup_steps,
        timed_steps_ms=recorder.timed_ms,
        profiled_steps=recorder.profiled,
        trace=recorder.trace,
        stacks=recorder.stacks,
        chosen=recorder.chosen,
        sources=probe.sites.sources(),
        functions=probe.functions,
        environment=environment(target, recorder.device, ranks),
        warnings=(*recorder.warnings, *probe.warnings),
        switched_on=probe.switched_on,
        end=replace(end, rank=ranks.rank) if end is not None else None,
        untrained=probe.untrained.names,
    )
