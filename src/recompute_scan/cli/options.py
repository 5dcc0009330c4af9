"""Options that several commands share: the recording and the machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from recompute_scan.cli.output import Number
from recompute_scan.errors import UsageError

# What has no meaning where a step is compared and none is timed or profiled.
_NOT_ALONE = ("steps", "timing_steps", "verify", "guard")
# What `--quick` makes of the others' steps: one is profiled, and nothing else is done.
_QUICK = {"steps": 1, "warmup": 1, "timing_steps": 0, "fidelity": False, "stacks": False}
_FEWEST_TIMED = 3

_OPTIONS = (
    click.option("--steps", default=5, show_default=True, help="Steps to profile."),
    click.option(
        "--warmup",
        default=3,
        help="Steps before anything is recorded.  [default: 3, or 1 where a step takes over 2 s]",
    ),
    click.option(
        "--timing-steps",
        default=10,
        show_default=True,
        help="Steps to time without the profiler, at most; fewer once their median is known.",
    ),
    click.option(
        "--quick",
        is_flag=True,
        help="Warm up once and profile one step: the verdict and the fix, without times.",
    ),
    click.option(
        "-o",
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for traces and report.  [default: recompute-scan-out/NAME]",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="What to record.",
    ),
    click.option("--nproc-per-node", type=int, help="Start that many processes with torchrun."),
    click.option(
        "--ranks",
        metavar="0|all|LIST",
        default="0,last",
        show_default=True,
        help="Ranks to record, such as 0,8-15; all stop after the same step.",
    ),
    click.option(
        "--verify",
        is_flag=True,
        help="Run it again with the fix applied in memory, and measure what that changes.",
    ),
    click.option(
        "--without-checkpointing",
        is_flag=True,
        help="With --verify: measure it without any checkpoint too, where it fits into memory.",
    ),
    click.option(
        "--fidelity/--no-fidelity",
        default=None,
        help="Only compare one step's recomputes with their forward, or leave that step out.  "
        "[default: compare it after the profiled ones]",
    ),
    click.option(
        "--guard",
        is_flag=True,
        help="Instead of recording, watch the whole training for recomputes that change.",
    ),
    click.option("--keep-going", is_flag=True, help="Let the script run on after the last step."),
    click.option(
        "--timeout",
        "timeout_s",
        default=600.0,
        show_default=True,
        type=Number(0),
        help="Seconds without progress after which a hanging run is ended; 0 for never.",
    ),
    click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as with `python -m`."),
    # From the process that started this one's launcher: it has read all the others.
    click.option("--handed-on", hidden=True),
)


def with_fidelity(context: click.Context, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The options for the recording, with what ``--quick``, ``--fidelity`` or its absence means for
    them.

    Raises:
        UsageError: One step alone is asked for, and something else too (``E236``).
    """
    quick, recorded = recorded["quick"], {**recorded}
    del recorded["quick"]
    if not (quick or recorded["fidelity"]):
        warmup = recorded["warmup"] if _given(context, "warmup") else 1
        if recorded["timing_steps"] > _FEWEST_TIMED:
            recorded["fewest"] = (min(warmup, recorded["warmup"]), _FEWEST_TIMED)
        return {**recorded, "fidelity": recorded["fidelity"] is None}
    alone = (*_NOT_ALONE, "warmup", "fidelity") if quick else _NOT_ALONE
    others = [name for name in alone if _given(context, name)]
    if others:
        name, does, hint = "--fidelity", "compares", "the step is compared after the profiled ones"
        if quick:
            name, does, hint = "--quick", "profiles", "everything is recorded then"
        raise UsageError(
            "E236",
            f"{name} {does} one step and does nothing else: --{others[0].replace('_', '-')} "
            "does not go with it.",
            hint=f"leave {name} out: {hint} anyway",
        )
    return {**recorded, **(_QUICK if quick else {"steps": 0, "timing_steps": 0})}


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def recording_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options to a command, in the order in which its help lists them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_GIB = 2**30


def machine_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options to a command, which gets them as one argument: ``machine``."""

    @click.option(
        "--peak-tflops",
        type=Number(min=0, min_open=True),
        help="Peak of one device in TFLOP/s, for MFU.  [default: that of the GPU found]",
    )
    @click.option(
        "--memory-gib",
        type=Number(min=0, min_open=True),
        help="Memory of one GPU in GiB, to plan with.  [default: that of the GPU found]",
    )
    @functools.wraps(command)
    def with_machine(
        *args: Any, peak_tflops: float | None, memory_gib: float | None, **others: Any
    ) -> int:
        from recompute_scan.cost.flops import Machine

        memory = round(memory_gib * _GIB) if memory_gib else None
        return command(*args, machine=Machine(peak_tflops, memory), **others)

    return with_machine
