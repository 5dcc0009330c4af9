"""Starting several processes, with torchrun's own launcher or the user's, and which one this is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from msgspec import Struct

from recompute_scan.errors import InputError
from recompute_scan.joining import MAIN, VARIABLE
from recompute_scan.run_info import read_run_info, run_info_name

_POLL_S = 0.1
# How long a launcher may take to end after a terminal has interrupted it.
_ENDING_S = 5.0
# Of a process that the script started itself, as long as it has no other rank.
_OWN_NUMBER = [0]
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class RankFacts(Struct, frozen=True):
    """Global rank of this process, 0-based, and how many there are."""

    rank: int
    world_size: int


def rank_facts() -> RankFacts:
    """This process's rank: from an initialised process group, else from its launcher's variables,
    else 0 of 1, or its number of 1 in a process that the script started.

    torchrun, accelerate and deepspeed set ``RANK`` and ``WORLD_SIZE`` before the script starts,
    Open MPI and launchers of the PMI kind their own; scripts under others tell torch only when they
    make their process group.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return RankFacts(distributed.get_rank(), distributed.get_world_size())
    for rank_name, size_name in _RANK_VARIABLES:
        if rank_name in os.environ:
            rank, world_size = _number(rank_name, 0), _number(size_name, 1)
            return RankFacts(rank, world_size) if 0 <= rank < world_size else RankFacts(0, 1)
    return RankFacts(_OWN_NUMBER[0], 1)


def started_as(number: int) -> None:
    """The script started this process itself, after so many others."""
    _OWN_NUMBER[0] = number


def launch(nproc_per_node: int, argv: Sequence[str]) -> int:
    """Exit status of N processes of ``recompute-scan ARGV…`` on this machine.

    0 when all of them end with 0, else that of the first that failed (128 + N for signal N),
    128 + N when signal N ends this process, 130 thus when interrupted. They meet on the loopback
    interface at a port that is free.

    Args:
        nproc_per_node: Number of processes.
        argv: What each process is given, such as ``["run", "--steps", "5", "train.py"]``.
    """
    # Not every build of torch has these, and only a launch needs them.
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc_per_node}"]
    own_threads = "OMP_NUM_THREADS" not in os.environ
    if own_threads:  # torchrun's own default, set here because it prints a warning when it does
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        run.run(run.parse_args([*options, MAIN, *argv]))
    except ChildFailedError as error:
        status = int(error.get_first_failure()[1].exitcode)
        return 128 - status if status < 0 else status
    except KeyboardInterrupt:
        return 130
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        if own_threads:
            os.environ.pop("OMP_NUM_THREADS", None)
    return 0


def launch_with(command: Sequence[str], handed: str) -> int:
    """Exit status of a launcher whose Python processes take part by themselves.

    See :mod:`recompute_scan.joining` for which do. 128 + N where signal N ended the launcher.

    Args:
        command: The launcher with all its arguments.
        handed: What each process is told, encoded.
    """
    environment = os.environ | {VARIABLE: handed}
    with subprocess.Popen(list(command), env=environment) as launcher:  # noqa: S603 - the user's
        before = signal.signal(signal.SIGTERM, lambda number, _: launcher.send_signal(number))
        try:
            status = _wait(launcher)
        finally:
            signal.signal(signal.SIGTERM, before)
    return 128 - status if status < 0 else status


def _wait(launcher: subprocess.Popen[bytes]) -> int:
    patience_s: float | None = None
    while True:
        try:
            return launcher.wait(patience_s)
        except KeyboardInterrupt:
            # A terminal interrupts it too, and it knows how to end its processes.
            patience_s = _ENDING_S
        except subprocess.TimeoutExpired:
            launcher.send_signal(signal.SIGINT)
            patience_s = None


def wait_for_ranks(folder: Path, world_size: int, timeout_s: float) -> list[int]:
    """Ranks whose run record lies complete in the folder, ascending; all of them, or those there
    after the timeout. Only files are looked at: a rank that died must not hang the others.
    """
    missing = set(range(world_size))
    deadline = time.monotonic() + timeout_s
    while True:
        for rank in sorted(missing):
            path = folder / run_info_name(rank)
            if path.exists():
                with suppress(InputError):
                    read_run_info(path)
                    missing.discard(rank)
        if not missing or time.monotonic() >= deadline:
            return sorted(set(range(world_size)) - missing)
        time.sleep(_POLL_S)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default
