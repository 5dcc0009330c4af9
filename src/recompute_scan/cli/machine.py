"""Options by which a person says what the device is capable of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from recompute_scan.cli.output import Number

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
        from recompute_scan.cost.peaks import Machine

        memory = round(memory_gib * _GIB) if memory_gib else None
        return command(*args, machine=Machine(peak_tflops, memory), **others)

    return with_machine
