"""Record the user's script, unchanged: in this process, in those that it starts, and in others.

Processes that the script starts are recorded as further ranks, whoever starts them:
``torch.multiprocessing.spawn``, its ``start_processes`` (as Lightning and accelerate do) or plain
``multiprocessing.Process``, by spawn, fork or forkserver. Processes with a target from a
library, such as data-loader workers and pools, run on as they are.

:func:`run_trial` records the script in processes of ours (``python -m recompute_scan --trial N
JSON``), so that nothing of one trial (GPU memory, caches, random states, process groups) is left
for the next.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from recompute_scan.errors import ScanError
from recompute_scan.files import made, make_new
from recompute_scan.record.attribution import is_library
from recompute_scan.record.execute import StopRecording, run_call, run_program
from recompute_scan.record.isolation import Call, Guard, Patches
from recompute_scan.record.launch import launch, rank_facts, started_as
from recompute_scan.record.options import (
    RunOptions,
    check_device,
    check_plan,
    decode,
    encode,
    prepare,
)
from recompute_scan.record.session import Host, Session, forget_parent, trained
from recompute_scan.record.shutdown import on_sigterm
from recompute_scan.record.steps import chosen
from recompute_scan.result.run_record import STOPPED, RunInfo, accept_so_far, run_records_in
from recompute_scan.startup import MAIN, Recorded


def record(options: RunOptions, on_exit: Callable[[RunInfo], None] | None = None) -> RunInfo:
    """This rank's run record of the run, as it was also written to ``run-rank<N>.json``.

    Where the script trains only in processes that it starts itself, those leave the run records,
    and the returned one shows how the script ended and how many ranks there are.

    Returns normally whatever the script does: its failure is in ``exit_status`` and ``end``. Only
    a script that hangs cannot be returned from (the process ends with status 124), nor one that
    calls ``os._exit``: then ``on_exit`` is called with the run record, maybe in another thread.

    Raises:
        UsageError: No such script (``E202``) or module (``E203``), impossible step counts
            (``E204``), no GPU although one is asked for (``E205``), an output folder that
            cannot be written (``E206``), or ranks that are none (``E224``).
    """
    chosen(options.ranks, 1)
    check_plan(options.plan, measuring=options.measure)
    check_device(options.device)
    folder = options.output.absolute()  # the script may change the current directory
    prepare(folder)
    guard = Guard()
    host = _Host(replace(options, output=folder), guard, on_exit)
    guard.run(host.install, otherwise=None)
    try:
        session = Session(options, folder, host, guard)
        program = partial(run_program, options.target, options.is_module, options.args)
        info = session.run(program)
    finally:
        host.remove()
    if trained(info) or info.bug is not None:
        return info
    worlds = [one.world_size for one in _records_of_children(folder)]
    return replace(info, world_size=max([1, *worlds]))


def _records_of_children(folder: Path) -> tuple[RunInfo, ...]:
    accept_so_far(folder)
    return run_records_in(folder)


class _Host(Host):
    """Records the processes that this one starts too, from :meth:`install` to :meth:`remove`.

    The options have the folder's absolute path.
    """

    def __init__(
        self,
        options: RunOptions,
        guard: Guard,
        on_exit: Callable[[RunInfo], None] | None,
    ) -> None:
        self.reports = on_exit is not None
        self._guard = guard
        self._options = options
        self._on_exit = on_exit
        self._numbers = itertools.count()
        self._started: list[BaseProcess] = []
        self._patches = Patches()

    def left(self, info: RunInfo) -> None:
        if self._on_exit is not None:
            self._on_exit(info)

    def keeps(self, info: RunInfo) -> bool:
        return trained(info) or not _records_of_children(self._options.output)

    def install(self) -> None:
        """Begin to watch; not below a launcher, which starts the ranks itself."""
        if rank_facts().world_size == 1:
            self._patches.wrap(self._guard, BaseProcess, "start", self._start)
            self._patches.wrap(self._guard, BaseProcess, "join", self._join, vital=True)

    def remove(self) -> None:
        self._patches.undo()

    def waits(self) -> bool:
        return any(process.pid is not None and process.is_alive() for process in self._started)

    def is_left(self) -> bool:
        return (self._options.output / STOPPED).exists() and not self.waits()

    def _start(self, call: Call, process: Any) -> None:
        kept = process._target, process._args
        try:
            self._guard.run(lambda: self._prepare(process), otherwise=None)
            call(process)
        finally:
            # A process that has been started has no target any more.
            if getattr(process, "_target", None) is not None:
                process._target, process._args = kept

    def _prepare(self, process: Any) -> None:
        target = process._target
        if target is None:
            return
        of_torch = getattr(target, "__module__", "") == "torch.multiprocessing.spawn"
        if of_torch and getattr(target, "__name__", "") == "_wrap":
            # It catches the function's exceptions, so our wrapper goes inside.
            function, *others = process._args
            process._args = (self._recorded(function), *others)
        elif not is_library(*_code_of(target)):
            process._target = self._recorded(target)
        else:
            return
        self._started.append(process)

    def _recorded(self, target: Callable[..., Any]) -> Recorded:
        return Recorded(target, encode(self._options), next(self._numbers), __name__)

    def _join(self, call: Call, process: BaseProcess, timeout: float | None = None) -> None:
        call(process, timeout)
        over = process in self._started and process.exitcode == 0
        if over and (self._options.output / STOPPED).exists():
            raise StopRecording(0)  # what comes next needs what the process was to leave


def run_here(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    text: str,
    number: int,
) -> Any:
    """The target's return value; it is called in this process, under the recorder.

    Its exception is raised again once all is written. It returns early, with ``None``, when
    everything is recorded. A target that makes no step leaves nothing.
    """
    options = decode(text, RunOptions)
    forget_parent()
    started_as(number)
    returned: list[Any] = []
    raised: list[BaseException] = []
    call = partial(run_call, partial(target, *args, **kwargs), returned, raised)
    info = Session(options, options.output, Host(), Guard()).run(call)
    if raised:
        raise raised[0]
    if not returned and info.exit_status == 0:
        make_new(options.output / STOPPED)
    return returned[0] if returned else None


def _code_of(target: Any) -> tuple[str, str]:
    """Module and file of a process's target."""
    while isinstance(target, partial):
        target = target.func
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None)
    module = getattr(target, "__module__", None) or ""
    return module, code.co_filename if code is not None else ""


# How long a trial that was asked to end may take for it.
_GRACE_S = 20.0


def run_trial(options: RunOptions, nproc_per_node: int | None, output: Path | None) -> int:
    """Exit status of the script, run with these options; its traces and run records lie in
    ``options.output``.

    It runs in so many processes of torchrun's launcher, if any, and prints into the file, if any.
    """
    command = [sys.executable, MAIN, "--trial", str(nproc_per_node or 0), encode(options)]
    # Sets of names are walked in an order that this decides.
    environment = {"PYTHONHASHSEED": "0", **os.environ}
    with (
        nullcontext() if output is None else made(output) as file,
        on_sigterm(_end),  # so a request to end reaches the trial too
        subprocess.Popen(  # noqa: S603 - this interpreter, this package
            command,
            env=environment,
            stdout=file,
            stderr=None if file is None else subprocess.STDOUT,
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


def run_trial_here(argv: Sequence[str]) -> int:
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


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
