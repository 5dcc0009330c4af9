"""From the traces of a run to its one result: each is read and answered, then they are merged.

The answer to one trace is what ran again, its price, and the findings that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan import trace as traces
from recompute_scan.advise.choice import kept
from recompute_scan.analysis.headline import headline
from recompute_scan.analysis.inputs import Loaded, load_one, name_mechanism, with_stacks
from recompute_scan.analysis.ranks import (
    Piece,
    bare_result,
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
from recompute_scan.cost.flops import UNKNOWN_MACHINE, Machine, count_flops, device_name
from recompute_scan.cost.memory import (
    Footprint,
    levels_of,
    measure_memory,
    weigh_memory,
    with_times,
)
from recompute_scan.cost.phases import device_time
from recompute_scan.cost.price import price, price_by_kernels, time_scale
from recompute_scan.errors import InputError, UsageError
from recompute_scan.files import opened, read
from recompute_scan.findings.base import Evidence
from recompute_scan.findings.registry import check_all
from recompute_scan.numpy_tools import places_of
from recompute_scan.progress import paused
from recompute_scan.recompute.alignment import Counts
from recompute_scan.recompute.attention_kernels import KernelEvidence
from recompute_scan.recompute.checks import confidence, doubts
from recompute_scan.recompute.regions import (
    attention_of,
    count_families,
    list_regions,
    show_proof,
)
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.result import (
    ByDesign,
    Checkpoint,
    Cost,
    CrossCheck,
    PlainCount,
    Region,
    Result,
    Step,
    from_json,
)
from recompute_scan.result.run_record import RunInfo, run_info_name
from recompute_scan.trace import DEFAULT_LIMITS, Address, Limits, Trace
from recompute_scan.trace.allocations import read_allocations
from recompute_scan.trace.columns import NS_PER_MS, Int64
from recompute_scan.trace.health import recorded_on
from recompute_scan.trace.sniff import is_snapshot, snapshots_in
from recompute_scan.workers import AUTOMATIC, HERE, Lost, Workers, run_each, usable_cores

if TYPE_CHECKING:
    from recompute_scan.compiled.code import Answered, Graphs

# A forward pass has at least this share of the operators of the largest in its step.
_SMALL_PASS = 0.1
# Of a trace without one.
_NO_RECORD = RunInfo(
    rank=0,
    world_size=1,
    status="complete",
    exit_status=0,
    device="cpu",
    warmup_steps=0,
    timed_steps_ms=(),
    profiled_steps=0,
    trace=None,
    stacks=None,
)


def result_of(trace: Trace, info: RunInfo | None = None) -> Result:
    """The result for one loaded trace, with its run's run record where there is one."""
    return result_from(study(trace, name_mechanism), info)


def result_from(
    facts: RecomputeFacts,
    info: RunInfo | None = None,
    machine: Machine = UNKNOWN_MACHINE,
    footprint: Footprint | None = None,
    graphs: Graphs | None = None,
) -> Result:
    """The result for what was found in one trace, and for what else is known of its run."""
    facts, opened, compiled = _answered(facts, graphs)
    info, known = info or _NO_RECORD, info is not None
    # No step takes no time: a record that says so has not timed it.
    timed = tuple(filter(None, info.timed_steps_ms))
    # Operators that run again inside a compiled graph, and recomputes that only annotations show,
    # are in no trace, and so have no price.
    priced = (compiled is None or compiled.priced) and not facts.judgement.by_annotations
    cost = _price(facts, timed, priced)
    scale = time_scale(facts, timed)
    regions = _regions(opened, scale, info, compiled)
    sure = confidence(facts, one_count=compiled is not None and not compiled.seen)
    environment = _environment(facts.trace, info)
    memory = weigh_memory(footprint, facts.trace, regions, cost, machine) if footprint else None
    evidence = Evidence(
        _known=facts,
        regions=regions,
        cost=cost,
        confidence=sure,
        sources=info.sources,
        switched_on=info.switched_on,
        environment=environment,
        memory=memory,
        untrained=info.untrained if known else None,
        fidelity=info.fidelity,
        graphs=compiled.code if compiled else None,
        policies=with_times(info.policies, facts, scale) if info.policies is not None else None,
        watched=info.watched,
    )
    findings, checked = check_all(evidence)
    warnings = (*info.warnings, *filter(None, [info.message]), *doubts(facts))
    device, step_ms = device_name(facts.trace, environment), cost.step_ms if cost else None
    result = replace(
        _counted(facts, opened, scale, warnings),
        confidence=sure,
        regions=regions,
        cost=cost,
        findings=findings,
        checked=checked,
        environment=environment,
        proof=show_proof(opened, regions),
        flops=count_flops(facts, step_ms, device, machine.peak_tflops) if priced else None,
        memory=memory,
        fidelity=info.fidelity,
        policies=evidence.policies,
        compiled=evidence.graphs,
        watched=info.watched,
    )
    return replace(result, headline=headline(result))


def _answered(
    facts: RecomputeFacts, graphs: Graphs | None
) -> tuple[RecomputeFacts, RecomputeFacts, Answered | None]:
    """The facts; these with compiled calls opened up; and the verdict on compiled code, if any."""
    if graphs is None:
        return facts, facts, None
    # The code that reads graphs is loaded where there are some.
    from recompute_scan.compiled.code import (  # noqa: PLC0415
        answer_compiled,
        answer_without_backward,
    )

    found = answer_without_backward(facts, graphs) or answer_compiled(facts, graphs)
    return (found.facts, found.opened, found) if found else (facts, facts, None)


def _price(facts: RecomputeFacts, timed: Sequence[float], priced: bool) -> Cost | None:
    cost = price_by_kernels(facts, timed) if facts.level == "kernels" else None
    if cost is not None or not priced:
        return cost
    levels = levels_of(facts) if facts.judgement.verdict == "doubled" else None
    return price(facts, timed, partial(kept, sharded=facts.sharded, levels=levels))


def _counted(
    facts: RecomputeFacts, opened: RecomputeFacts, scale: float, warnings: tuple[str, ...]
) -> Result:
    """The verdict, and what was counted for it."""
    judgement = facts.judgement
    families = count_families(opened, scale) if facts.level != "graphs" else ()
    if facts.attention is not None and attention_of(families) is None:
        families += facts.attention.families
    return replace(
        bare_result(
            judgement.reason,
            "",
            verdict=judgement.verdict,
            evidence_level=facts.level,
            warnings=warnings,
        ),
        recompute_per_backward=judgement.highest,
        mean_recompute=judgement.mean,
        recomputed_share=judgement.share,
        attention=attention_of(families),
        steps=_steps(facts, opened.counts),
        families=families,
        health=_health(facts),
        cross_check=_cross_check(facts),
        by_design=_by_design(facts, scale),
    )


def _by_design(facts: RecomputeFacts, scale: float) -> tuple[ByDesign, ...]:
    steps = max(1, facts.complete_count)
    return tuple(
        ByDesign(
            function=each.function,
            inside=each.inside,
            forward_per_step=each.forward / steps,
            recomputed_per_step=each.again / steps,
            kernels_per_step=each.kernels / steps,
            recompute_ms_per_step=each.time / NS_PER_MS * scale / steps,
            with_gradients=each.graded,
        )
        for each in facts.designed_runs
    )


def _cross_check(facts: RecomputeFacts) -> CrossCheck | None:
    """The plain count, where the answer is one of operators."""
    if facts.level == "kernels":
        return None
    return CrossCheck(
        agrees=facts.plain.agrees,
        counts=tuple(
            PlainCount(
                name=tally.name,
                outside=tally.outside,
                inside=tally.inside,
                in_hooks=tally.hooked,
                matched=tally.again,
            )
            for tally in facts.plain.tallies
        ),
    )


def _regions(
    opened: RecomputeFacts, scale: float, info: RunInfo, compiled: Answered | None
) -> tuple[Region, ...]:
    """The regions, with what the run's run record knows of their call sites."""
    regions = list_regions(opened, scale)
    if compiled is not None:
        from recompute_scan.compiled.code import with_call_sites  # noqa: PLC0415

        regions = with_call_sites(regions, info.sources, info.switched_on)

    def sourced(checkpoint: Checkpoint) -> Checkpoint:
        if checkpoint.call_site is None:
            site = info.functions.get(checkpoint.function or "")
            checkpoint = replace(checkpoint, call_site=site)
        source = info.sources.get(checkpoint.call_site or "")
        return replace(checkpoint, source=source.statement) if source else checkpoint

    return tuple(
        replace(region, checkpoints=tuple(map(sourced, region.checkpoints))) for region in regions
    )


def _steps(facts: RecomputeFacts, opened: Counts) -> tuple[Step, ...]:
    if facts.attention is not None and facts.level == "kernels":
        return _attention_steps(facts.attention)
    counts = facts.counts
    trained = facts.alignment.backwards > 0
    steps = []
    of_step, opened_of = places_of(counts.step), places_of(opened.step)
    none = np.zeros(0, np.int64)
    for position, span in enumerate(facts.steps):
        mine, inside = of_step.get(position, none), opened_of.get(position, none)
        steps.append(
            Step(
                index=span.index,
                start_us=span.start / 1000,
                duration_ms=(span.end - span.start) / NS_PER_MS,
                complete=bool(facts.complete[position]),
                micro_batches=_micro_batches(counts.batch[mine[trained[mine]]]),
                forward_ops=len(inside),
                recomputed_ops=int(opened.runs[inside].sum()),
            )
        )
    return tuple(steps)


def _micro_batches(batch: Int64) -> int:
    """Forward passes of one step, from the pass that each of its operators belongs to.

    A small pass behind a backward pass is a second loss on the same forward pass, not another
    forward pass.
    """
    sizes = np.unique(batch, return_counts=True)[1]
    return int(np.count_nonzero(sizes >= _SMALL_PASS * sizes.max(initial=0)))


def _attention_steps(evidence: KernelEvidence) -> tuple[Step, ...]:
    """Steps in which attention's main kernels stand for the forward pass's operators."""
    return tuple(
        Step(
            index=step.span.index,
            start_us=step.span.start / 1000,
            duration_ms=(step.span.end - step.span.start) / NS_PER_MS,
            complete=bool(step.passes),
            micro_batches=len(step.passes or ()),
            forward_ops=sum(each.layers for each in step.passes or ()),
            recomputed_ops=sum(each.again for each in step.passes or ()),
        )
        for step in evidence.steps
    )


def _health(facts: RecomputeFacts) -> dict[str, int]:
    health = dict(facts.trace.health)
    health["events"] = len(facts.trace)
    counters = {
        "kernels_without_launch": facts.work.unlaunched,
        "nesting_overruns": facts.calls.overruns,
        "guessed_parents": facts.calls.guessed,
        "unexplained_operators": len(facts.alignment.unexplained),
        "incomplete_steps": len(facts.steps) - facts.complete_count,
    }
    return health | {name: number for name, number in counters.items() if number}


def _environment(trace: Trace, info: RunInfo) -> dict[str, str]:
    environment = dict(info.environment)
    if (recorded := recorded_on(trace)) is not None:
        environment.setdefault("recorded", recorded)
    if isinstance(source := trace.metadata.get("source"), str):
        environment.setdefault("profiler", source)
    devices = trace.metadata.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        name = devices[0].get("name")
        if isinstance(name, str):
            environment.setdefault("gpu", f"{len(devices)} x {name}")
    distributed = trace.metadata.get("distributedInfo")
    if isinstance(distributed, dict):
        for key in ("backend", "world_size"):
            if isinstance(distributed.get(key), (str, int)):
                environment.setdefault(key, str(distributed[key]))
    return environment


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
    snapshots = snapshots_at(given, limits)
    if given and not addresses:
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
        # By the compiler's logs, or by compared steps.
        logs = [log for address in addresses for log in logs_alone(address, limits)]
        pieces = [Piece(log.name, log.rank, result_of_log(log)) for log in logs]
        if pieces := pieces or _by_hooks(ends.records if refused else ()):
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


def _by_hooks(records: Sequence[RunInfo], trace: Result | None = None) -> list[Piece]:
    found = [(one, result_by_hooks(one, trace)) for one in records]
    return [Piece(run_info_name(one.rank), one.rank, told) for one, told in found if told]


def _or_by_hooks(piece: Piece, records: Sequence[RunInfo]) -> Piece:
    """The answer; where no step is whole in its trace, what hooks saw in the same rank."""
    if piece.result.verdict != "inconclusive" or any(one.complete for one in piece.result.steps):
        return piece
    same = [one for one in records if one.rank == piece.rank]
    return next(iter(_by_hooks(same, piece.result)), piece)


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
