"""One rank's run record of its recording, with what it ran on, once that is over."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from recompute_scan.crash import RankEnd
from recompute_scan.frameworks.known import packages
from recompute_scan.record.compat import compiled_something
from recompute_scan.record.launch.launcher import RankFacts
from recompute_scan.record.probe import Probe
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.scope import COMMAND, Plan, Wording, shortfall
from recompute_scan.run_info import RunInfo

_PACKAGES = (*packages(), "flash-attn")


def environment(target: str, device: Literal["cpu", "cuda"], ranks: RankFacts) -> dict[str, str]:
    """Versions and settings of this process, all text. The script's arguments are left out:
    they may hold secrets.
    """
    facts = {
        "target": target,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "device": device,
        "world_size": str(ranks.world_size),
        "torch_compile": "used" if compiled_something() else "not used",
    }
    budget = getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0)
    if budget != 1.0:  # the compiler recomputes by itself
        facts["activation_memory_budget"] = str(budget)
    if device == "cuda":
        facts["device_name"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda or torch.version.hip or "")
    else:
        facts["processor"] = _processor()
        facts["threads"] = str(torch.get_num_threads())
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        facts["backend"] = str(distributed.get_backend())
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _processor() -> str:
    """The model of the processor, as the system names it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def make_run_record(
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
    """The run record.

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
    kept, ranks = recorder.kept, recorder.ranks
    if not recorder.chosen:
        plan = replace(plan, steps=0)
    missing = kept.failure or shortfall(plan, recorder.seen, wording)
    outcome: Literal["complete", "ended-early", "failed"] = "ended-early" if missing else "complete"
    message = missing
    if failure is not None:
        outcome = "failed"
        message = " ".join(part for part in (failure, missing) if part)
    return RunInfo(
        bug=recorder.bug,
        rank=ranks.rank,
        world_size=ranks.world_size,
        status=outcome,
        exit_status=status,
        message=message,
        device=kept.device,
        warmup_steps=kept.warmup_steps,
        timed_steps_ms=kept.timed_ms,
        profiled_steps=kept.profiled,
        trace=kept.trace,
        stacks=kept.stacks,
        chosen=recorder.chosen,
        sources=probe.sites.sources(),
        functions=probe.functions,
        environment=environment(target, kept.device, ranks),
        warnings=(*kept.warnings, *probe.warnings),
        switched_on=probe.switched_on,
        end=replace(end, rank=ranks.rank) if end is not None else None,
        untrained=probe.untrained.names,
        fidelity=kept.fidelity,
        policies=kept.policies,
    )
