"""From the traces of a run to its one result: each is read and answered, then they are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan import trace as traces
from recompute_scan.analysis.answer import result_from
from recompute_scan.analysis.inputs import Loaded, load_one, name_mechanism, with_stacks
from recompute_scan.analysis.ranks import (
    Piece,
    ends_in,
    merge,
    result_by_hooks,
    result_of_log,
    result_of_snapshots,
    result_without_trace,
    snapshots_among,
    snapshots_at,
)
from recompute_scan.compiled.logs import is_text, logs_alone
from recompute_scan.cost.flops import UNKNOWN_MACHINE, Machine
from recompute_scan.cost.memory import Footprint, measure_memory
from recompute_scan.cost.phases import device_time
from recompute_scan.errors import InputError, UsageError
from recompute_scan.files import opened, read
from recompute_scan.garbage import paused
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.result import Result, from_json
from recompute_scan.result.run_record import RunInfo, run_info_name
from recompute_scan.trace import DEFAULT_LIMITS, Address, Limits
from recompute_scan.trace.allocations import read_allocations
from recompute_scan.trace.sniff import is_snapshot, snapshots_in
from recompute_scan.workers import AUTOMATIC, HERE, Lost, Workers, run_each, usable_cores

# With fewer bytes of JSON for each, a second process costs more than it brings.
_BYTES_A_WORKER = 25_000_000
# How much larger the JSON of a trace is than its compressed file.
_INFLATES = 12
_HEAD = 200
# The error of a folder without traces.
_NO_TRACE = "E308"

Progress = Callable[[str], None]


def analyse(
    addresses: Sequence[Address],
    on_progress: Progress = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
    machine: Machine = UNKNOWN_MACHINE,
    *,
    hta: bool = False,
    workers: Workers = HERE,
) -> Result:
    """The result for the given traces: files, folders of one trace a rank, remote addresses.

    Args:
        addresses: Files, folders, globs, archives; remote addresses as text.
        on_progress: Called with a line for the person before each long piece of work.
        limits: What is refused as too large.
        machine: The device as the user gives it.
        hta: Whether Holistic Trace Analysis is asked too; where it cannot be, a warning says so.
        workers: Where the traces are read; only their results come back from there.

    Raises:
        InputError: Nothing could be read (see :mod:`recompute_scan.trace.sources`). Where only
            some of several traces cannot be read, the rest is analysed and a warning says so.
        UsageError: The workers cannot be had (see :func:`recompute_scan.workers.run_each`).
    """
    given = [Path(one) for one in addresses if is_snapshot(Path(one))]
    addresses = [one for one in addresses if Path(one) not in given]
    folders = [Path(one) for one in addresses if Path(one).is_dir()]
    beside = [path for folder in folders for path in snapshots_in(folder)]
    if not given and not beside:
        return _analyse_traces(addresses, on_progress, limits, machine, hta=hta, workers=workers)
    snapshots = snapshots_at(given, limits)
    if not addresses:
        return result_of_snapshots(snapshots)
    snapshots += snapshots_among(beside, limits)
    try:
        result = _analyse_traces(addresses, on_progress, limits, machine, hta=hta, workers=workers)
    except InputError as error:
        if error.code != _NO_TRACE or not snapshots:
            raise
        return result_of_snapshots(snapshots)
    return replace(result, snapshots=snapshots) if snapshots else result


def _analyse_traces(
    addresses: Sequence[Address],
    on_progress: Progress,
    limits: Limits,
    machine: Machine,
    *,
    hta: bool,
    workers: Workers,
) -> Result:
    ends = ends_in(addresses)
    try:
        found = traces.find(addresses, limits)
        refused = None
    except InputError as error:
        found, refused = [], error
    if not ends.failed and (refused or all(map(is_text, found))):
        pieces = _without_trace(addresses, ends.records if refused else (), limits)
        if pieces:
            return merge(pieces, ())
        if refused:
            raise refused
    jobs = [_Job(*each, limits, machine, hta) for each in enumerate(found)]
    answers = _answer_each(jobs, workers, on_progress)
    pieces = [answer for answer in answers if isinstance(answer, Piece)]
    failures = [answer for answer in answers if isinstance(answer, InputError)]
    pieces = [_or_by_hooks(piece, ends.records) for piece in pieces]
    if not pieces and ends.failed:
        pieces = _by_hooks(ends.records)
        whole = merge(pieces, ()) if pieces else result_without_trace(ends.records[0])
        return ends.with_crash(whole)
    whole = merge(pieces, failures)
    return ends.with_crash(whole) if ends.failed else whole


def _without_trace(
    addresses: Sequence[Address], records: Sequence[RunInfo], limits: Limits
) -> list[Piece]:
    """The answers without a trace: by the compiler's logs, or by compared steps."""
    logs = [log for address in addresses for log in logs_alone(address, limits)]
    told = [Piece(log.name, log.rank, result_of_log(log)) for log in logs]
    return told or _by_hooks(records)


def _by_hooks(records: Sequence[RunInfo]) -> list[Piece]:
    found = [(one, result_by_hooks(one)) for one in records]
    return [Piece(run_info_name(one.rank), one.rank, told) for one, told in found if told]


def _or_by_hooks(piece: Piece, records: Sequence[RunInfo]) -> Piece:
    """The answer; where no step is whole in its trace, what hooks saw in the same rank."""
    if piece.result.verdict != "inconclusive" or any(one.complete for one in piece.result.steps):
        return piece
    return next((one for one in _by_hooks(records) if one.rank == piece.rank), piece)


class _Job(Struct, frozen=True):
    """One trace to be read and answered, wherever that happens."""

    number: int
    address: Address
    limits: Limits
    machine: Machine
    hta: bool


def _answer_each(
    jobs: Sequence[_Job], workers: Workers, on_progress: Progress
) -> list[Piece | InputError]:
    if workers == AUTOMATIC:
        workers = _worth_it(jobs)
    if workers == HERE:
        return [_answer(job, on_progress) for job in jobs]

    def tell(done: int) -> None:
        on_progress(f"read {done} of {len(jobs)} traces")

    answers = run_each(partial(_answer, on_progress=_quiet), jobs, workers, tell)
    return [_lost(answer) if isinstance(answer, Lost) else answer for answer in answers]


def _worth_it(jobs: Sequence[_Job]) -> Workers:
    """As many workers as cores, jobs and the size of the files on this machine give reason for."""
    files = [job.address for job in jobs if isinstance(job.address, Path)]
    size = sum(
        file.stat().st_size * (1 if file.suffix == ".json" else _INFLATES)
        for file in files
        if file.is_file()
    )
    return Workers(max(1, min(usable_cores(), len(jobs), size // _BYTES_A_WORKER)))


def _answer(job: _Job, on_progress: Progress) -> Piece | InputError:
    try:
        with paused():  # of the columns and what is found in them, nothing is part of a cycle
            one = load_one(job.address, job.number, on_progress, job.limits)
            result = answer_to(one, job.machine, job.limits, on_progress)
    except InputError as error:
        # A traceback holds every frame, and so the buffers of the reader.
        error.__context__ = None
        return error.with_traceback(None)
    return Piece(one.name, one.rank, _with_hta(result, one) if job.hta else result)


def _quiet(_: str) -> None:
    """Ignores the lines of a worker: the head process counts instead."""


def _lost(lost: Lost[_Job]) -> InputError:
    return InputError(
        "E329",
        f"{traces.name_of(lost.job.address)} was not analyzed: its worker process died twice.",
        why=lost.why,
        hint="often it needed more memory than there was: try fewer --workers",
    )


def answer_to(one: Loaded, machine: Machine, limits: Limits, on_progress: Progress) -> Result:
    """The result for one loaded trace, with the frames and memory in its file."""
    facts = study(one.trace, name_mechanism)
    facts = with_stacks(facts, one.address, one.info, limits, on_progress)
    return result_from(facts, one.info, machine, _footprint(facts, one, limits), one.graphs)


def _with_hta(result: Result, one: Loaded) -> Result:
    from recompute_scan.hta_bridge import break_down  # noqa: PLC0415 - nothing else needs it

    try:
        found = break_down(one.trace)
    except Exception as error:  # other people's code, and no part of the answer
        return replace(result, warnings=(*result.warnings, _left_out(error)))
    if found is not None:
        found = replace(found, rank=one.rank, own=device_time(one.trace))
    return replace(result, hta=found)


def _left_out(error: Exception) -> str:
    """The error and its hint in one sentence: a warning is one line."""
    if isinstance(error, UsageError):
        what, why = error.what.removesuffix("."), f" ({error.why})" if error.why else ""
        said = f"{what}, so it was left out{why}; to add it: {error.hint}"
    else:
        said = f"Holistic Trace Analysis was left out because it failed: {error!r}"
    return " ".join(said.split())


def _footprint(facts: RecomputeFacts, one: Loaded, limits: Limits) -> Footprint | None:
    """The memory in the trace itself, or in the step with stacks that `run` adds."""
    if isinstance(one.address, str):
        return None
    try:
        if found := read_allocations(one.address, one.trace, limits):
            return measure_memory(facts, found)
        beside = one.address.with_name(f"stacks-rank{one.rank}.json.gz")
        if one.info is None or not beside.is_file():
            return None
        trace = traces.load(beside, limits=limits)
        found = read_allocations(beside, trace, limits)
        return measure_memory(study(trace), found) if found else None
    except (InputError, OSError):
        return None  # it was not asked for, and the rest does not need it


def result_at(address: Address, on_progress: Progress = lambda _: None) -> Result:
    """The result in a result file or a run's folder, else the result of the traces there.

    Raises:
        InputError: There is neither (see :func:`analyse`), or the result is of another schema.
    """
    path = Path(address)
    found = written_result(path / "result.json" if path.is_dir() else path)
    return analyse([address], on_progress) if found is None else found


def written_result(path: Path) -> Result | None:
    """The result in a file of any name; ``None`` where the file does not begin as one.

    Raises:
        InputError: It is of another schema.
    """
    try:
        with opened(path) as file:
            named = path.name == "result.json"
            if not named and b'"recompute-scan/' not in (file.read(_HEAD) or b""):
                return None
    except OSError:
        return None
    return from_json(read(path))
