"""The traces of a run, each with the account of its run that lies beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from recompute_scan import trace as traces
from recompute_scan.errors import InputError
from recompute_scan.run_info import RunInfo, parse_run_info, run_info_name, so_far_name
from recompute_scan.stacks import with_module_frames
from recompute_scan.trace import DEFAULT_LIMITS, Address, Limits, Trace


@dataclass(frozen=True)
class Loaded:
    """One trace of a run, with what is known beside it.

    Attributes:
        name: The trace's own name, without folders.
        rank: The rank it is of.
        trace: The trace.
        info: The account of its run, where there is one.
        address: Where it was read from.
    """

    name: str
    rank: int
    trace: Trace
    info: RunInfo | None
    address: Address


def load_each(
    addresses: Sequence[Address],
    failures: list[InputError],
    on_progress: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Loaded]:
    """The traces one after the other, so that one at a time is held.

    Args:
        addresses: Files, folders of one trace a rank, globs, archives; remote addresses as text.
        failures: What could not be read is added here.
        on_progress: Called with a line for the person before each is read.
        limits: What is refused as too large.

    Raises:
        InputError: An address stands for nothing (see :func:`recompute_scan.trace.find`).
    """
    for number, address in enumerate(traces.find(addresses, limits)):
        try:
            yield load_one(address, number, on_progress, limits)
        except InputError as error:
            error.__context__ = None  # with their tracebacks, both hold the reader's buffers
            failures.append(error.with_traceback(None))


def load_one(
    address: Address,
    number: int,
    on_progress: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
) -> Loaded:
    """One trace file with its account.

    Args:
        address: The file, a member of an archive, or a remote address.
        number: Its place among the traces of the run: its rank, where nothing tells it.
        on_progress: Called with a line for the person.
        limits: What is refused as too large.

    Raises:
        InputError: It cannot be read (see :func:`recompute_scan.trace.load`), or its account is
            damaged.
    """
    name = traces.name_of(address)
    on_progress(f"reading {name}")
    trace = with_module_frames(traces.load(address, limits=limits), address, limits)
    info = _info_beside(address, limits)
    rank = info.rank if info else trace.rank if trace.rank is not None else number
    return Loaded(name, rank, trace, info, address)


def _info_beside(address: Address, limits: Limits) -> RunInfo | None:
    """The account that `run` wrote beside ``trace-rank<N>.json.gz``, if there is one."""
    if isinstance(address, str):
        return None
    rank = address.name.removeprefix("trace-rank").partition(".")[0]
    if not rank.isdigit():
        return None
    # Of a rank that was killed there may be only what it had accounted for so far.
    for name in (run_info_name(int(rank)), so_far_name(int(rank))):
        data = traces.read_beside(address.with_name(name), limits)
        if data is not None:
            return parse_run_info(data, name)
    return None
