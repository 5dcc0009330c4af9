"""The traces of a run with their run records, and the readings of a trace that are needed.

Frames are most of a trace that has them, and are skipped at first. Where they are few, all are
read, for the names of modules. Where they are many, the frames of one step are read, and only when
work was recomputed, no annotation names the call site, and the trace, or the one with stacks that
`run` writes next to it, has frames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan import trace as traces
from recompute_scan.annotations import REGION
from recompute_scan.compiled.logs import records_beside
from recompute_scan.errors import InputError
from recompute_scan.files import is_there
from recompute_scan.frameworks.registry import recognise
from recompute_scan.recompute.frames import has_frames
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.result.run_record import RunInfo, parse_run_info, run_info_name, so_far_name
from recompute_scan.trace import DEFAULT_LIMITS, Address, Limits, Trace

if TYPE_CHECKING:
    from recompute_scan.compiled.code import Graphs


class Loaded(Struct, frozen=True):
    """One trace of a run, with its run record and graphs.

    Attributes:
        name: The trace's own name, without folders.
        rank: The rank it is of.
        trace: The trace.
        info: The run record of its run, where there is one.
        address: Where it was read from.
        graphs: The compiler's graphs in the same folder, where there are some.
    """

    name: str
    rank: int
    trace: Trace
    info: RunInfo | None
    address: Address
    graphs: Graphs | None = None


def load_each(
    addresses: Sequence[Address],
    failures: list[InputError],
    on_progress: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Loaded]:
    """The traces one after the other, so that one at a time is held.

    What cannot be read is added to ``failures``.

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
    on_progress: Callable[[str], None],
    limits: Limits,
) -> Loaded:
    """One trace file with its run record.

    ``number`` is its place among the traces of the run: its rank, where no record has it.

    Raises:
        InputError: It cannot be read (see :func:`recompute_scan.trace.load`), or its run record is
            damaged.
    """
    name = traces.name_of(address)
    on_progress(f"reading {name}")
    trace = with_module_frames(traces.load(address, limits=limits), address, limits)
    info = _info_beside(address, limits)
    rank = info.rank if info else trace.rank if trace.rank is not None else number
    return Loaded(name, rank, trace, info, address, _graphs_beside(address, rank, info, limits))


def _graphs_beside(
    address: Address, rank: int, info: RunInfo | None, limits: Limits
) -> Graphs | None:
    """The compiler's graphs that `run` wrote next to a trace, else torch's own."""
    records = records_beside(address, rank, limits)
    if records is None:
        return None
    # The code that reads graphs is loaded where there are some.
    from recompute_scan.compiled.code import graphs_from  # noqa: PLC0415

    budget = info.environment.get("activation_memory_budget", "") if info else ""
    known = float(budget) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", budget) else None
    return graphs_from(records, known)


def _info_beside(address: Address, limits: Limits) -> RunInfo | None:
    """The run record that `run` wrote next to ``trace-rank<N>.json.gz``, if there is one."""
    if isinstance(address, str):
        return None
    rank = address.name.removeprefix("trace-rank").partition(".")[0]
    if not rank.isdecimal() or len(rank) > 9:
        return None
    # Of a rank that was killed there may be only what it had recorded so far.
    for name in (run_info_name(int(rank)), so_far_name(int(rank))):
        data = traces.read_beside(address.with_name(name), limits)
        if data is not None:
            return parse_run_info(data, name)
    return None


# Most events of a second reading: about 500 MB of columns.
_MOST_EVENTS = 5_000_000
# So many are few: a moment suffices to read them.
_FEW_FRAMES = 500_000


def with_module_frames(trace: Trace, address: Address, limits: Limits) -> Trace:
    """The trace again with all its Python frames, where it has some but few.

    Frames name modules: they are read where no annotation of the recording does.

    Raises:
        InputError: See :func:`recompute_scan.trace.load`.
    """
    if not trace.metadata.get("with_stack") or not 0 < trace.left_out <= _FEW_FRAMES:
        return trace
    if any(name.startswith(REGION) for name in trace.names):
        return trace
    return traces.load(address, python=True, limits=limits)


def with_stacks(
    facts: RecomputeFacts,
    address: Address,
    info: RunInfo | None,
    limits: Limits,
    on_progress: Callable[[str], None],
) -> RecomputeFacts:
    """The facts, with call sites and mechanisms from Python frames where those are needed.

    A remote trace is not fetched a second time.
    """
    if facts.annotations is not None or not facts.alignment.recomputes or isinstance(address, str):
        return facts
    if has_frames(facts.trace):
        return facts
    stacked, whole = facts.trace.metadata.get("with_stack"), facts.whole_steps
    source = address if stacked else _stacks_beside(address, info)
    if source is None or not whole:
        return facts
    # One step shows as much as all, and all steps of a long trace would not fit into memory.
    again = source == address
    moved = facts.trace.moved
    within = (whole[0].start - moved, whole[0].end - moved) if again else None
    outline = facts.trace.outline if again else None
    on_progress(f"reading the Python frames of {traces.name_of(source)}")
    bounded = replace(limits, events=min(limits.events, _MOST_EVENTS))
    try:
        trace = traces.load(source, python=True, within=within, outline=outline, limits=bounded)
    except InputError:  # too many frames, or a file that is not there any more
        return facts
    return _carried_over(facts, study(trace, name_mechanism))


def name_mechanism(place: str) -> str:
    """Name of the mechanism that asks for checkpoints from this place in code."""
    return recognise(place).name


def _carried_over(facts: RecomputeFacts, framed: RecomputeFacts) -> RecomputeFacts:
    """The facts, with the checkpoints of another step of the same run, block by block."""
    model = [block for block in framed.blocks if block.batch == framed.blocks[0].batch]
    passes = [list(blocks) for _, blocks in groupby(facts.blocks, lambda block: block.batch)]
    if not framed.framed or any(len(blocks) != len(model) for blocks in passes):
        return facts
    blocks = [
        replace(
            block,
            checkpoints=named.checkpoints,
            parts=tuple(
                replace(part, checkpoints=other.checkpoints)
                for part, other in zip(block.parts, named.parts, strict=False)
            ),
            span=replace(
                block.span, module=named.span.module, module_class=named.span.module_class
            ),
        )
        for one in passes
        for block, named in zip(one, model, strict=True)
    ]
    return replace(facts, blocks=tuple(blocks), framed=True)


def _stacks_beside(trace: Path, info: RunInfo | None) -> Path | None:
    """The trace with stacks that `run` wrote next to this one, if there is one."""
    path = trace.with_name(info.stacks) if info and info.stacks else None
    # A link could lead out of the folder.
    return path if path is not None and is_there(path) and not path.is_symlink() else None
