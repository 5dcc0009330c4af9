"""One run of the script in processes of its own: ``python -m recompute_scan --trial N JSON``.

:func:`run_trial` starts it and waits; :func:`run_here` is what runs there. Nothing of one trial
(GPU memory, caches, random states, process groups) is left for the next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from recompute_scan.errors import ScanError
from recompute_scan.files import made
from recompute_scan.record.children import record
from recompute_scan.record.launch import launch
from recompute_scan.record.options import RunOptions, decode, encode
from recompute_scan.startup import MAIN

# How long a trial that was asked to end may take for it.
_GRACE_S = 20.0


def run_trial(options: RunOptions, nproc_per_node: int | None, output: Path | None) -> int:
    """Exit status of the script, run with these options; its traces and run records lie in
    ``options.output``.

    Args:
        options: What to run and what to record.
        nproc_per_node: Processes to start with torchrun's launcher; ``None`` for one without.
        output: File for what the script prints; ``None`` lets it print here.
    """
    command = [sys.executable, MAIN, "--trial", str(nproc_per_node or 0), encode(options)]
    # Sets of names are walked in an order that this decides.
    environment = {"PYTHONHASHSEED": "0", **os.environ}
    if output is None:
        return _wait(command, environment, None)
    with made(output) as file:
        return _wait(command, environment, file)


def run_here(argv: Sequence[str]) -> int:
    """Record as the options say, here or in N processes."""
    nproc_per_node, text = int(argv[0]), argv[1]
    if nproc_per_node:
        return launch(nproc_per_node, ["--trial", "0", text])
    options = decode(text, RunOptions)
    try:
        return record(options).exit_status
    except ScanError as error:
        print(f"recompute-scan: {error}", file=sys.stderr)
        return error.exit_status


def _wait(command: Sequence[str], environment: dict[str, str], output: Any) -> int:
    errors = subprocess.STDOUT if output is not None else None
    with (
        _ending_on_sigterm(),
        subprocess.Popen(  # noqa: S603 - this interpreter, this package
            command, env=environment, stdout=output, stderr=errors
        ) as process,
    ):
        try:
            status = process.wait()
        except BaseException:  # interrupted: so is the trial, as a rule, by the same terminal
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return 128 - status if status < 0 else status


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """A request to end reaches the trial too, since it turns into an exception here."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
