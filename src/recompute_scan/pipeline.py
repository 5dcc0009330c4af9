"""From traces to the one result: load, find replays, price them, check the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recompute_scan import trace as traces
from recompute_scan._version import __version__
from recompute_scan.advise.choose import kept
from recompute_scan.annotations import REGION
from recompute_scan.cost.flops import count_flops
from recompute_scan.cost.headroom import weigh_memory
from recompute_scan.cost.machine import UNKNOWN_MACHINE, Machine, device_name
from recompute_scan.cost.memory import Footprint, measure_memory
from recompute_scan.cost.price import price, time_scale
from recompute_scan.ends import ends_in
from recompute_scan.errors import InputError
from recompute_scan.findings.base import Evidence
from recompute_scan.findings.registry import check_all, check_ranks
from recompute_scan.headline import confidence, headline, marks_disagree
from recompute_scan.recompute.agreement import disagreeing_steps
from recompute_scan.recompute.facts import Recompute, study
from recompute_scan.recompute.families import attention_of, count_families, count_kernels
from recompute_scan.recompute.kernel_evidence import KernelEvidence
from recompute_scan.recompute.proof import show_proof
from recompute_scan.recompute.regions import list_regions
from recompute_scan.result import Checkpoint, Rank, Region, Result, Step, Verdict, from_json
from recompute_scan.run_info import RunInfo, Source, parse_run_info, run_info_name
from recompute_scan.stacks import name_mechanism, with_stacks
from recompute_scan.trace import DEFAULT_LIMITS, Address, Limits, Trace
from recompute_scan.trace.columns import Int64
from recompute_scan.trace.memory import read_allocations

# Which rank's answer stands for the run when they differ: the worst.
_SEVERITY: dict[Verdict, int] = {
    "doubled": 4,
    "full": 3,
    "partial": 2,
    "none": 1,
    "inconclusive": 0,
}


# A forward pass has at least this share of the operators of the largest in its step.
_SMALL_PASS = 0.1
# Events that a trace may have left out for its Python frames to be read after all.
_MOST_FRAMES = 500_000


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


@dataclass(frozen=True)
class Piece:
    """The answer for one rank."""

    name: str
    rank: int
    result: Result


def analyse(
    addresses: Sequence[Address],
    on_progress: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
    machine: Machine = UNKNOWN_MACHINE,
    *,
    hta: bool = False,
) -> Result:
    """The result for the given traces: files, folders of one trace a rank, remote addresses.

    Args:
        addresses: Files, folders, globs, archives; remote addresses as text.
        on_progress: Called with a line for the person before each long piece of work.
        limits: What is refused as too large.
        machine: What is known of the device beside what the traces say.
        hta: Whether Holistic Trace Analysis is asked too; where it cannot be, a warning says so.

    Raises:
        InputError: Nothing could be read (see :mod:`recompute_scan.trace.store`). Where only
            some of several traces cannot be read, the rest is analysed and a warning says so.
    """
    ends = ends_in(addresses)
    failures: list[InputError] = []
    pieces: list[Piece] = []
    try:
        for one in load_each(addresses, failures, on_progress, limits):
            answer = answer_to(one, machine, limits, on_progress)
            answer = _with_hta(answer, one.trace) if hta else answer
            pieces.append(Piece(one.name, one.rank, answer))
    except InputError:
        if not ends.failed:
            raise
    if not pieces and ends.failed:
        return ends.with_crash(_without_trace(ends.accounts[0]))
    whole = merge(pieces, failures)
    return ends.with_crash(whole) if ends.failed else whole


def load_each(
    addresses: Sequence[Address],
    failures: list[InputError],
    on_progress: Callable[[str], None] = lambda _: None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Loaded]:
    """The traces one after the other, so that one at a time is held; see :func:`analyse`.

    Args:
        addresses: As for :func:`analyse`.
        failures: What could not be read is added here.
        on_progress: As for :func:`analyse`.
        limits: As for :func:`analyse`.
    """
    for number, address in enumerate(traces.find(addresses, limits)):
        on_progress(f"reading {traces.name_of(address)}")
        try:
            trace = _with_module_frames(traces.load(address, limits=limits), address, limits)
        except InputError as error:
            failures.append(error)
            continue
        info = _info_beside(address, limits)
        rank = info.rank if info else trace.rank if trace.rank is not None else number
        yield Loaded(traces.name_of(address), rank, trace, info, address)


def answer_to(
    one: Loaded, machine: Machine, limits: Limits, on_progress: Callable[[str], None]
) -> Result:
    """The result for one loaded trace, with what else its file tells (frames, memory)."""
    facts = study(one.trace, name_mechanism)
    facts = with_stacks(facts, one.address, one.info, limits, on_progress)
    return result_from(facts, one.info, machine, _footprint(facts, one, limits))


def _with_hta(result: Result, trace: Trace) -> Result:
    from recompute_scan.hta_bridge import break_down  # noqa: PLC0415 - nothing else needs it

    try:
        return replace(result, hta=break_down(trace))
    except Exception as error:  # other people's code, and no part of the answer
        said = f"Holistic Trace Analysis was left out: {error}"
        return replace(result, warnings=(*result.warnings, said))


def _footprint(facts: Recompute, one: Loaded, limits: Limits) -> Footprint | None:
    """The memory that the trace itself tells of, or the step with stacks that `run` adds."""
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


def _with_module_frames(trace: Trace, address: Address, limits: Limits) -> Trace:
    """The trace again with its Python frames, where it has some and not too many.

    Frames name modules, and are most of a trace that has them: they are read only where blocks
    would go without names otherwise, and up to a number that a moment suffices for.
    """
    if not trace.metadata.get("with_stack") or not 0 < trace.left_out <= _MOST_FRAMES:
        return trace
    if any(name.startswith(REGION) for name in trace.names):
        return trace
    return traces.load(address, python=True, limits=limits)


def merge(pieces: Sequence[Piece], failures: Sequence[InputError]) -> Result:
    """One result for all ranks: that of the worst, and a row for each.

    Raises:
        InputError: There is no piece; the first failure.
    """
    if not pieces:
        raise failures[0]
    main = worst(pieces)
    unread = tuple(f"Left out: {error.what} {error.why or ''}".strip() for error in failures)
    result = replace(
        main.result,
        ranks=tuple(_rank(piece) for piece in sorted(pieces, key=lambda piece: piece.rank)),
        warnings=main.result.warnings + _rank_warnings(pieces) + unread,
    )
    return check_ranks(result)


def worst(pieces: Sequence[Piece]) -> Piece:
    """The piece whose answer stands for the run."""
    return max(pieces, key=lambda piece: (_SEVERITY[piece.result.verdict], -piece.rank))


def result_at(address: Address, on_progress: Callable[[str], None] = lambda _: None) -> Result:
    """The result that a result file or a run's folder holds, else that of the traces there.

    Raises:
        InputError: There is neither (see :func:`analyse`), or the result is of another schema.
    """
    path = Path(address)
    written = path / "result.json" if path.is_dir() else path
    if written.name == "result.json" and written.is_file():
        return from_json(written.read_bytes())
    return analyse([address], on_progress)


def result_of(
    trace: Trace, info: RunInfo | None = None, machine: Machine = UNKNOWN_MACHINE
) -> Result:
    """The result for one loaded trace, with its run's account where there is one."""
    return result_from(study(trace, name_mechanism), info, machine)


def result_from(
    facts: Recompute,
    info: RunInfo | None = None,
    machine: Machine = UNKNOWN_MACHINE,
    footprint: Footprint | None = None,
) -> Result:
    """The result for what was found in one trace.

    Args:
        facts: What ran again.
        info: The account of its run.
        machine: What is known of the device beside what the trace says.
        footprint: The memory of a step of the same run.
    """
    sources = info.sources if info else {}
    timed = info.timed_steps_ms if info else ()
    cost = price(facts, timed, kept)
    scale = time_scale(facts, timed)
    regions = _with_sources(list_regions(facts, scale), sources)
    sure = confidence(facts)
    environment = _environment(facts.trace, info)
    switched_on = info.switched_on if info else ()
    memory = weigh_memory(footprint, facts.trace, regions, cost, machine) if footprint else None
    findings, checked = check_all(
        Evidence(
            facts,
            regions,
            cost,
            sure,
            sources,
            switched_on,
            environment,
            memory,
            info.untrained if info else None,
        )
    )
    families = count_families(facts, scale)
    if facts.attention is not None and attention_of(families) is None:
        families += count_kernels(facts.attention)
    judgement = facts.judgement
    result = Result(
        tool_version=__version__,
        verdict=judgement.verdict,
        evidence_level=facts.level,
        confidence=sure,
        reason=judgement.reason,
        headline="",
        recompute_per_backward=judgement.highest,
        mean_recompute=judgement.mean,
        recomputed_share=judgement.share,
        attention=attention_of(families),
        steps=_steps(facts),
        families=families,
        regions=regions,
        cost=cost,
        findings=findings,
        checked=checked,
        ranks=(),
        health=_health(facts),
        environment=environment,
        warnings=_warnings(facts, info),
        proof=show_proof(facts, regions),
        flops=count_flops(
            facts,
            cost.step_ms if cost else None,
            device_name(facts.trace, environment),
            machine.peak_tflops,
        ),
        memory=memory,
    )
    return replace(result, headline=headline(result))


def _without_trace(info: RunInfo) -> Result:
    """The result of a run that failed before anything could be recorded."""
    reason = info.message or "The run failed before a step was recorded."
    return Result(
        tool_version=__version__,
        verdict="inconclusive",
        evidence_level="annotated",
        confidence="low",
        reason=reason,
        headline="The run failed before a step was recorded: no verdict on checkpointing.",
        recompute_per_backward=None,
        mean_recompute=None,
        recomputed_share=None,
        attention=None,
        steps=(),
        families=(),
        regions=(),
        cost=None,
        findings=(),
        checked=(),
        ranks=(),
        health={},
        environment=info.environment,
        warnings=info.warnings,
    )


def _info_beside(address: Address, limits: Limits) -> RunInfo | None:
    """The account that `run` wrote beside ``trace-rank<N>.json.gz``, if there is one."""
    if isinstance(address, str):
        return None
    rank = address.name.removeprefix("trace-rank").partition(".")[0]
    if not rank.isdigit():
        return None
    account = address.with_name(run_info_name(int(rank)))
    data = traces.read_beside(account, limits)
    return parse_run_info(data, account.name) if data is not None else None


def _with_sources(regions: tuple[Region, ...], sources: Mapping[str, Source]) -> tuple[Region, ...]:
    def sourced(checkpoint: Checkpoint) -> Checkpoint:
        source = sources.get(checkpoint.call_site or "")
        return replace(checkpoint, source=source.statement) if source else checkpoint

    return tuple(
        replace(region, checkpoints=tuple(sourced(c) for c in region.checkpoints))
        for region in regions
    )


def _steps(facts: Recompute) -> tuple[Step, ...]:
    if facts.attention is not None and facts.level == "kernels":
        return _attention_steps(facts.attention)
    counts = facts.counts
    trained = facts.alignment.backwards > 0
    steps = []
    for position, span in enumerate(facts.steps):
        mine = counts.step == position
        steps.append(
            Step(
                index=span.index,
                start_us=span.start / 1000,
                duration_ms=(span.end - span.start) / 1e6,
                complete=bool(facts.complete[position]),
                micro_batches=_micro_batches(counts.batch[mine & trained]),
                forward_ops=int(mine.sum()),
                recomputed_ops=int(counts.runs[mine].sum()),
            )
        )
    return tuple(steps)


def _micro_batches(batch: Int64) -> int:
    """Forward passes of one step, from the pass that each of its operators belongs to.

    What follows a backward pass and is small beside the rest is a second loss on the same
    forward pass, not another one.
    """
    sizes = np.unique(batch, return_counts=True)[1]
    return int(np.count_nonzero(sizes >= _SMALL_PASS * sizes.max(initial=0)))


def _attention_steps(evidence: KernelEvidence) -> tuple[Step, ...]:
    """Steps in which attention's main kernels stand for the forward pass's operators."""
    return tuple(
        Step(
            index=step.span.index,
            start_us=step.span.start / 1000,
            duration_ms=(step.span.end - step.span.start) / 1e6,
            complete=bool(step.passes),
            micro_batches=len(step.passes or ()),
            forward_ops=sum(each.layers for each in step.passes or ()),
            recomputed_ops=sum(each.again for each in step.passes or ()),
        )
        for step in evidence.steps
    )


def _health(facts: Recompute) -> dict[str, int]:
    health = dict(facts.trace.health)
    health["events"] = len(facts.trace)
    counters = {
        "kernels_without_launch": facts.work.unlaunched,
        "nesting_overruns": facts.calls.overruns,
        "unexplained_operators": len(facts.alignment.unexplained),
        "incomplete_steps": len(facts.steps) - facts.complete_count,
    }
    return health | {name: number for name, number in counters.items() if number}


def _environment(trace: Trace, info: RunInfo | None) -> dict[str, str]:
    environment = dict(info.environment) if info else {}
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


def _warnings(facts: Recompute, info: RunInfo | None) -> tuple[str, ...]:
    found = list(info.warnings) if info else []
    if info is not None and info.message:
        found.append(info.message)
    found.extend(traces.sentences(facts.trace.health))
    if facts.framed:
        found.append(
            "Who asked for the checkpoints was read off Python frames: a line is that where the "
            "function begins that makes the call, and who switched it on is not known."
        )
    if facts.attention is not None and facts.level == "kernels":
        found.extend(facts.attention.notes)
    if differing := disagreeing_steps(facts):
        said = ", ".join(
            f"{step} ({'not known' if runs is None else f'{runs:g}'})"
            for step, runs in differing.items()
        )
        found.append(f"Steps differ from the others in how often work runs again: {said}.")
    if facts.marks is not None and marks_disagree(facts):
        found.append(
            f"The marks of the recorded checkpoints and the operators disagree on "
            f"{facts.marks.disagreeing} of {facts.marks.replayed} replayed operators; the counts "
            "are those of the operators."
        )
    if unlaunched := facts.work.unlaunched:
        every = len(facts.kernels.event)
        found.append(
            "No device activity has a record of its launch, so none belongs to an operator."
            if unlaunched == every
            else f"{unlaunched} of {every} device activities have no record of their launch and "
            "belong to no operator: recording began while the GPU still had a queue."
        )
    return tuple(found)


def _rank(piece: Piece) -> Rank:
    cost = piece.result.cost
    return Rank(
        rank=piece.rank,
        trace=piece.name,
        verdict=piece.result.verdict,
        step_ms=cost.step_ms if cost else None,
        replays_per_block=_replays_per_block(piece.result),
        recompute_ms=cost.recompute_ms if cost else None,
    )


def _replays_per_block(result: Result) -> float | None:
    if result.verdict == "inconclusive" or not result.regions:
        return None
    return float(np.mean([region.recompute_runs_per_backward for region in result.regions]))


def _rank_warnings(pieces: Sequence[Piece]) -> tuple[str, ...]:
    verdicts = {piece.result.verdict for piece in pieces}
    if len(verdicts) < 2:
        return ()
    said = ", ".join(sorted(verdicts))
    return (f"The ranks differ ({said}); this report shows the worst.",)
