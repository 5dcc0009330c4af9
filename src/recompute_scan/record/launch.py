"""Launchers and ranks, and the files that ranks leave.

Nothing here is a collective, so that nothing can get between the script's. A rank without
a process group, or without its store, cannot ask and goes by what it knows itself. Files that
ranks wrote to other file systems come into rank 0's folder through that store, in pieces, once
the script has ended, without a port, an address or a login.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from msgspec import Struct

from recompute_scan.errors import InputError
from recompute_scan.files import content, made, write_whole
from recompute_scan.record.shutdown import on_sigterm
from recompute_scan.record.steps import DEFAULT, Plan, StepTimer, chosen
from recompute_scan.record.torch_versions import holds
from recompute_scan.result.run_record import (
    WORD,
    RunInfo,
    compiled_name,
    encode_run_info,
    read_run_info,
    run_info_name,
    so_far_name,
)
from recompute_scan.startup import MAIN, VARIABLE

_POLL_S = 0.1
# How long a rank is waited for that has left no file.
_SIGN_S = 15.0
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


def has_process_group() -> bool:
    """Whether the script has made one, and it is still there."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_facts() -> RankFacts:
    """This process's rank: from an initialised process group, else from its launcher's variables,
    else 0 of 1, or its number of 1 in a process that the script started.

    torchrun, accelerate and deepspeed set ``RANK`` and ``WORLD_SIZE`` before the script starts,
    Open MPI and launchers of the PMI kind set others; under any other launcher the rank is known
    once the script has made its process group.
    """
    if has_process_group():
        return RankFacts(torch.distributed.get_rank(), torch.distributed.get_world_size())
    for rank_name, size_name in _RANK_VARIABLES:
        if rank_name in os.environ:
            rank, world_size = number_in(rank_name, 0), number_in(size_name, 1)
            return RankFacts(rank, world_size) if 0 <= rank < world_size else RankFacts(0, 1)
    return RankFacts(_OWN_NUMBER[0], 1)


def started_as(number: int) -> None:
    """The script started this process itself, after so many others."""
    _OWN_NUMBER[0] = number


def launch(nproc_per_node: int, argv: Sequence[str]) -> int:
    """Exit status of N processes of ``recompute-scan ARGV…`` on this machine.

    0 when all of them end with 0, else the status of the first that failed (128 + N for signal N),
    128 + N when signal N ends this process, 130 thus when interrupted. They meet on the loopback
    interface at a port that is free.
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
    """Exit status of a launcher; the Python processes that it starts take part by themselves.

    See :mod:`recompute_scan.startup` for which do. 128 + N where signal N ended the launcher.
    ``handed`` are the options for each process, encoded.
    """
    environment = os.environ | {VARIABLE: handed}
    with (
        subprocess.Popen(list(command), env=environment) as launcher,  # noqa: S603 - the user's
        on_sigterm(lambda number, _: launcher.send_signal(number)),
    ):
        status = _wait(launcher)
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
    """Ranks that have a complete run record in the folder, ascending: all, or those that have
    one after the timeout. Only files are looked at: a rank that died must not hang the others.

    A rank leaves a file when it starts to record. One without any after some seconds does not take
    part: the variables of a launcher outlive it in some shells.
    """
    missing = set(range(world_size))
    began = monotonic()
    while True:
        # Looked at first: it goes when the run record is there.
        records = any((folder / so_far_name(rank)).exists() for rank in missing)
        for rank in sorted(missing):
            path = folder / run_info_name(rank)
            if path.exists():
                with suppress(InputError):
                    read_run_info(path)
                    missing.discard(rank)
        waited_s = monotonic() - began
        if not missing or waited_s >= (timeout_s if records else min(timeout_s, _SIGN_S)):
            return sorted(set(range(world_size)) - missing)
        sleep(_POLL_S)


def number_in(name: str, default: int) -> int:
    """The number that a variable of the environment holds; the default where it holds none."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


# Torch's stores take values of up to 8 MiB.
_PIECE = 1 << 20
# A store is not made for bulk: larger traces stay where they are.
MOST_BYTES = 64 << 20
_TIMEOUT_S = 60.0
# Errors of the store when the rank or agent that held it has gone.
_GONE = (RuntimeError, ValueError)


def mark_folder(folder: Path, store: Any, rank: int) -> None:
    """Rank 0 leaves a word in its folder and in the store: who finds both shares the folder."""
    if rank == 0 and store is not None:
        word = uuid.uuid4().hex
        with suppress(OSError, *_GONE):
            write_whole(folder / WORD, word.encode())
            store.set("word", word)


def send(folder: Path, store: Any, info: RunInfo) -> None:
    """At the end of a rank other than 0, send its files where rank 0 cannot see them."""
    key = f"rank{info.rank}"
    with suppress(OSError, *_GONE):
        if _shares(folder, store):
            store.set(key, json.dumps({"files": [], "left": None}))
            return
        names = [name for name in (info.trace, info.stacks) if name is not None]
        if (folder / compiled_name(info.rank)).is_file():
            names.append(compiled_name(info.rank))
        size = sum((folder / name).stat().st_size for name in names)
        left = None
        if size > MOST_BYTES:
            left, names = f"{socket.gethostname()}:{folder}", []
        files = {name: content(folder / name) for name in names}
        files[run_info_name(info.rank)] = encode_run_info(info)  # last: with it all is there
        sent = []
        for name, data in files.items():
            pieces = range(0, len(data), _PIECE)
            for number, at in enumerate(pieces):
                store.set(f"{key}/{name}/{number}", data[at : at + _PIECE])
            sent.append([name, len(pieces)])
        store.set(key, json.dumps({"files": sent, "left": left}))


def receive(folder: Path, store: Any, world_size: int) -> tuple[str, ...]:
    """At the end of rank 0, take the files that the others sent into its folder.

    Waits for each rank's word, or its run record in this folder, for a minute at most.

    Returns:
        A sentence for each rank that had traces too large to send.
    """
    said = []
    waited = set(range(1, world_size))
    deadline = monotonic() + _TIMEOUT_S
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        while waited and monotonic() < deadline:
            for rank in sorted(waited):
                if (folder / run_info_name(rank)).exists():
                    waited.discard(rank)
                elif holds(store, f"rank{rank}"):
                    waited.discard(rank)
                    left = _take(folder, store, rank)
                    if left is not None:
                        said.append(
                            f"The traces of rank {rank} lie in {left}: copy them into {folder} "
                            "and run `recompute-scan analyze` on it."
                        )
            if waited:
                sleep(_POLL_S)
    return tuple(said)


def _shares(folder: Path, store: Any) -> bool:
    # Without a word from rank 0 no rank collects files: as good as shared.
    if not holds(store, "word"):
        return True
    try:
        return bool(content(folder / WORD) == store.get("word"))
    except FileNotFoundError:
        return False


def _take(folder: Path, store: Any, rank: int) -> str | None:
    about = json.loads(store.get(f"rank{rank}"))
    traces = f"trace-rank{rank}.json.gz", f"stacks-rank{rank}.json.gz"
    expected = (*traces, compiled_name(rank), run_info_name(rank))
    for name, pieces in about["files"]:
        if name not in expected:  # it came over the network
            continue
        partial = folder / f".{name}.part"
        with made(partial) as file:
            for number in range(pieces):
                key = f"rank{rank}/{name}/{number}"
                file.write(store.get(key))
                store.delete_key(key)
        partial.replace(folder / name)
    left = about["left"]
    return None if left is None else str(left)


_PREFIX = "recompute_scan"


class Membership:
    """One rank among the others.

    Attributes:
        ranks: This process among the others, as last known.
        store: The store of the script's process group, once :meth:`settle` has looked.
        chosen: Whether this rank is to record; known from then on.
        last_step: After which step all of them stop.
    """

    def __init__(self, plan: Plan, recording_ranks: str) -> None:
        self._plan = plan
        self._recording_ranks = recording_ranks
        self._timing_ends: int | None = None
        self._timings = 0
        self.ranks = rank_facts()
        self.store: Any | None = None
        self.chosen = True
        self.last_step = LastStep(plan.wanted)

    @property
    def alone(self) -> bool:
        return self.ranks.world_size == 1

    def look(self) -> None:
        self.ranks = rank_facts()

    def settle(self, folder: Path, made: int) -> str | None:
        """The warm-up is over after so many steps: meet the others, and see whether this one is to
        record.

        Returns:
            A warning where the run has no rank of those that were asked for.
        """
        self.ranks = rank_facts()  # now, because the script may leave its group before it ends
        self.store = _store_of_group()
        self.last_step.store = self.store
        if not self.alone and self._plan.fewest is not None and self.store is not None:
            self._timing_ends, self._timings = None, self._timings + 1
            self.last_step.planned = self._plan.least
            if self.ranks.rank == 0:
                self.last_step.wait(made)
        mark_folder(folder, self.store, self.ranks.rank)
        warning = None
        recording = chosen(self._recording_ranks, self.ranks.world_size)
        if not recording:
            warning = (
                f"--ranks {self._recording_ranks} names no rank of the {self.ranks.world_size} "
                "of this run; the first and the last were recorded."
            )
            recording = chosen(DEFAULT, self.ranks.world_size)
        self.chosen = self.alone or self.ranks.rank in recording
        return warning

    def is_timed(self, made: int, timer: StepTimer) -> bool:
        """Have enough steps been timed? Of several ranks the first decides, by its own times.

        The others hear of it a step later, and all end with the same one. One that hears too late
        times more of them, and stops with the rest.
        """
        enough = self._plan.is_timed
        if self._plan.fewest is None or timer.steps >= self._plan.timing:
            return timer.steps >= self._plan.timing
        if self.alone:
            return enough(timer.milliseconds(wait=False))
        if self._timing_ends is None and self.store is not None:
            key = f"timed{self._timings}"
            with suppress(*_GONE):
                if self.ranks.rank != 0:
                    self._timing_ends = int(self.store.get(key)) if holds(self.store, key) else None
                elif enough(timer.milliseconds(wait=False)):
                    self.store.set(key, str(made + 1))
                    self._timing_ends = made + 1
        return self._timing_ends is not None and made >= self._timing_ends

    def go_on(self, made: int) -> None:
        """The script goes on here, so it must go on everywhere, if there is time to say so."""
        if self.alone and rank_facts().world_size == 1:
            return
        if self.last_step.store is None:
            self.last_step.store = _store_of_group()
        self.last_step.wait(made)


def _store_of_group() -> Any | None:
    """The store behind the script's process group, for keys of ours; ``None`` without one."""
    if not has_process_group():
        return None
    # Private, but there since 1.8 and what torchrun's own tools use; the group has no other door.
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - not in every build

    try:
        return c10d.PrefixStore(_PREFIX, c10d._get_default_store())
    except (AttributeError, RuntimeError, ValueError):
        return None


class LastStep:
    """After which step every rank stops, so that none waits for one that has stopped before.

    By itself this is the planned step, the same everywhere, without any question. A rank
    that cannot record yet, because the script's own profiler runs or because the first rank times
    as many steps as it needs, asks all for more steps and says later how many: :meth:`wait`, then
    :meth:`settle`. The others look when they would stop. Ranks without a common store make all the
    steps that are planned.

    Ranks that communicate in every step are one step apart at most, and the host may run ahead
    of a GPU a little further; so nothing is asked for later than :data:`NOTICE` steps before the
    end, and no end is set nearer than that.

    Attributes:
        planned: The step, as far as is known.
        store: Where the others can be reached; known once the warm-up is over.
    """

    NOTICE = 3

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.store: Any | None = None
        self._open = False
        self._number = 0

    def wait(self, made: int) -> bool:
        """Ask all ranks to go on until :meth:`settle`; ``False`` where it is too late for that."""
        if self._open:
            return True
        near = made > self.planned - self.NOTICE and not self._is_awaited()
        if near and made > self.planned - self.NOTICE:
            return False
        self._open = True
        self._number = self._ask(lambda store: store.add("waits", 1), 0)
        return True

    def settle(self, made: int, needed: int) -> None:
        """The wait is over, and so many more steps are needed from here."""
        if not self._open:
            return
        self._open = False
        self.planned = max(self.planned, made + max(needed, self.NOTICE))
        self._ask(lambda store: store.set(f"wait{self._number}", str(self.planned)), None)

    def passed(self, made: int) -> bool:
        """Whether the last step has been made, as far as any rank has announced."""
        if self._open or made < self.planned:
            return False
        return not self._is_awaited() and made >= self.planned

    def _is_awaited(self) -> bool:
        """Whether some rank still asks for more steps; takes in the requests of the others."""
        for number in range(1, self._ask(lambda store: store.add("waits", 0), 0) + 1):
            key = f"wait{number}"
            said = self._ask(lambda store, key=key: holds(store, key) and store.get(key), b"0")
            if not said:
                return True
            self.planned = max(self.planned, int(said))
        return False

    def _ask(self, question: Any, otherwise: Any) -> Any:
        if self.store is None:
            return otherwise
        try:
            return question(self.store)
        except (RuntimeError, ValueError):  # it has gone with the rank that held it
            self.store = None
            return otherwise
