"""One function over many jobs: in this process, in a pool of processes, or on a Dask cluster.

A job with a worker that died (killed for memory, say) is tried once more, alone, and then
returned as :class:`Lost`: it takes no other job with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from recompute_scan.errors import MissingExtra, UsageError

Job = TypeVar("Job")
Answer = TypeVar("Answer")

# Seconds in which a Dask scheduler has to answer.
_DASK_TIMEOUT_S = 30
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONSAFEPATH, from Python 3.11 on.
_SAFE_PATH = "PYTHONSAFEPATH"


class Lost(Struct, Generic[Job], frozen=True):
    """A job that no worker brought to an end, twice; ``why`` is one sentence."""

    job: Job
    why: str


class Workers(Struct, frozen=True):
    """Where jobs run.

    Attributes:
        count: Processes on this machine; 1 is this process itself, and 0 stands for a number
            that whoever has the jobs decides. Not used with ``dask``.
        dask: Address of a Dask scheduler (``tcp://host:8786``), or the path of its scheduler
            file; ``None`` for this machine.
    """

    count: int = 1
    dask: str | None = None


HERE = Workers()
# As many processes on this machine as make the work faster.
AUTOMATIC = Workers(count=0)


def usable_cores() -> int:
    """How many cores this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_each(
    function: Callable[[Job], Answer],
    jobs: Sequence[Job],
    workers: Workers = HERE,
    on_done: Callable[[int], None] = lambda _: None,
) -> list[Answer | Lost[Job]]:
    """The function's answers in the order of the jobs, or a :class:`Lost` in a job's place.

    Args:
        function: A function of a module; for other processes it and its jobs are pickled.
        jobs: What it is called with, one after the other.
        workers: Where. The main module must be importable for processes (no work outside of
            ``if __name__ == "__main__"``).
        on_done: Called with the number of finished jobs after each.

    Raises:
        UsageError: The Dask scheduler does not answer (``E219``).
        MissingExtra: Dask is asked for and not installed (``E201``).
        Exception: Whatever the function raised.
    """
    here = workers.dask is None and workers.count <= 1
    if sys.version_info < (3, 11) and workers.dask is None:  # _SAFE_PATH means nothing to it
        here = here or _hides_modules_of_pythons(os.curdir)
    if here:
        answers: list[Answer | Lost[Job]] = []
        for job in jobs:
            answers.append(function(job))
            on_done(len(answers))
        return answers
    found: dict[int, Answer | Lost[Job]] = {}
    left = list(range(len(jobs)))
    with _pool(workers, min(workers.count, len(jobs))) as pool:
        lost = _gather(pool, function, jobs, left, found, on_done)
    for place in sorted(lost):  # each alone: the one that kills its worker ends no other
        with _pool(workers, 1) as pool:
            again = _gather(pool, function, jobs, [place], found, on_done)
        for why in again.values():
            found[place] = Lost(jobs[place], why)
            on_done(len(found))
    return [found[place] for place in range(len(jobs))]


class _Pool(NamedTuple):
    """Starts a job, and gives the started ones as they end; Dask's futures are its own."""

    submit: Callable[..., Any]
    as_completed: Callable[..., Iterator[Any]]


def _gather(
    pool: _Pool,
    function: Callable[[Job], Answer],
    jobs: Sequence[Job],
    places: Sequence[int],
    found: dict[int, Answer | Lost[Job]],
    on_done: Callable[[int], None],
) -> dict[int, str]:
    """Fill in answers; returns the places where a worker died, with the reason."""
    from concurrent.futures import BrokenExecutor  # noqa: PLC0415 - as above

    lost: dict[int, str] = {}
    waiting: dict[Any, int] = {}
    for place in places:
        try:
            waiting[pool.submit(function, jobs[place])] = place
        except BrokenExecutor as error:
            lost[place] = _reason(error)
    for future in pool.as_completed(list(waiting)):
        place = waiting[future]
        try:
            found[place] = future.result()
            on_done(len(found))
        except Exception as failure:
            # Dask's own errors (KilledWorker, closed connections) say so by where they are defined.
            by_dask = type(failure).__module__.startswith("distributed")
            if not by_dask and not isinstance(failure, BrokenExecutor):
                raise
            lost[place] = _reason(failure)
    return lost


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _pool(workers: Workers, count: int) -> Iterator[_Pool]:
    if workers.dask is not None:
        with _dask_pool(workers.dask) as pool:
            yield pool
        return
    import multiprocessing  # noqa: PLC0415 - most analyses start no process
    from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: PLC0415

    # A fresh interpreter each: forking a process with threads is not safe.
    context = multiprocessing.get_context("spawn")
    with (
        _importing_nothing_from_here(),
        ProcessPoolExecutor(max_workers=count, mp_context=context) as executor,
    ):
        yield _Pool(executor.submit, as_completed)


@contextmanager
def _importing_nothing_from_here() -> Iterator[None]:
    """Python is started without the current folder, which may be a stranger's, on its path.

    multiprocessing starts it by ``-c``, and sends it our own path only after its first imports.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SAFE_PATH, None)
        else:
            os.environ[_SAFE_PATH] = before


def _hides_modules_of_pythons(folder: str) -> bool:
    """Does a folder hold files that a Python started in it takes for the standard library?"""
    try:
        return any(name.partition(".")[0] in sys.stdlib_module_names for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return True


@contextmanager
def _dask_pool(address: str) -> Iterator[_Pool]:
    try:
        from distributed import Client, as_completed  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingExtra("distributed", "dask", "Reading on a Dask cluster") from None
    file = {"scheduler_file": address} if os.path.isfile(address) else {"address": address}  # noqa: PTH113
    try:
        client = Client(**file, timeout=_DASK_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise UsageError(
            "E219",
            f"The Dask scheduler at {address} does not answer.",
            why=_reason(error),
            hint="give the address that `dask scheduler` or your cluster prints, "
            "such as tcp://host:8786",
        ) from None
    # Not its executor of :mod:`concurrent.futures`: that fails, or never ends, where the worker
    # dies that holds an answer.
    with client:
        yield _Pool(partial(client.submit, pure=False), as_completed)
