"""The result for one trace: what ran again, its price, and the findings that follow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from recompute_scan._version import __version__
from recompute_scan.advise.choice import kept
from recompute_scan.analysis.confidence import confidence, doubts, headline
from recompute_scan.analysis.inputs import name_mechanism
from recompute_scan.cost.flops import UNKNOWN_MACHINE, Machine, count_flops, device_name
from recompute_scan.cost.memory import Footprint, levels_of, weigh_memory, with_times
from recompute_scan.cost.price import price, price_by_kernels, time_scale
from recompute_scan.findings.base import Evidence
from recompute_scan.findings.registry import check_all
from recompute_scan.numpy_tools import places_of
from recompute_scan.recompute.attention_kernels import KernelEvidence
from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.regions import (
    attention_of,
    count_families,
    count_kernels,
    list_regions,
    show_proof,
)
from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.result import ByDesign, Checkpoint, CrossCheck, PlainCount, Region, Result, Step
from recompute_scan.result.run_record import RunInfo, Source
from recompute_scan.trace import Trace
from recompute_scan.trace.columns import Int64
from recompute_scan.trace.health import recorded_on

if TYPE_CHECKING:
    from recompute_scan.compiled.code import Graphs

# A forward pass has at least this share of the operators of the largest in its step.
_SMALL_PASS = 0.1


def result_of(
    trace: Trace,
    info: RunInfo | None = None,
    machine: Machine = UNKNOWN_MACHINE,
    graphs: Graphs | None = None,
) -> Result:
    """The result for one loaded trace, with its run's run record where there is one."""
    return result_from(study(trace, name_mechanism), info, machine, graphs=graphs)


def result_from(
    facts: RecomputeFacts,
    info: RunInfo | None = None,
    machine: Machine = UNKNOWN_MACHINE,
    footprint: Footprint | None = None,
    graphs: Graphs | None = None,
) -> Result:
    """The result for what was found in one trace.

    Args:
        facts: What ran again.
        info: The run record of its run.
        machine: The device as the user gives it.
        footprint: The memory of a step of the same run.
        graphs: The compiler's graphs of the same run, where they are known.
    """
    compiled = None
    if graphs is not None:  # what reads graphs is loaded where there are some
        from recompute_scan.compiled.code import (  # noqa: PLC0415
            answer_compiled,
            answer_without_backward,
        )

        compiled = answer_without_backward(facts, graphs) or answer_compiled(facts, graphs)
    facts, opened = (compiled.facts, compiled.opened) if compiled else (facts, facts)
    sources = info.sources if info else {}
    # No step takes no time: a record that says so has not timed it.
    timed = tuple(filter(None, info.timed_steps_ms)) if info else ()
    # Operators that run again inside a compiled graph are in no trace, and so have no price. The
    # same is true of recomputes that only annotations show.
    priced = (compiled is None or compiled.priced) and not facts.judgement.by_marks
    cost = price_by_kernels(facts, timed) if facts.level == "kernels" else None
    if cost is None and priced:
        levels = levels_of(facts) if facts.judgement.verdict == "doubled" else None
        cost = price(facts, timed, partial(kept, sharded=facts.sharded, levels=levels))
    scale = time_scale(facts, timed)
    switched_on = info.switched_on if info else ()
    regions = list_regions(opened, scale)
    if compiled is not None:
        from recompute_scan.compiled.code import with_call_sites  # noqa: PLC0415

        regions = with_call_sites(regions, sources, switched_on)
    regions = _with_sources(regions, sources, info.functions if info else {})
    sure = confidence(facts)
    if sure == "high" and compiled is not None and not compiled.seen:
        sure = "medium"
    environment = _environment(facts.trace, info)
    memory = weigh_memory(footprint, facts.trace, regions, cost, machine) if footprint else None
    policies = info.policies if info else None
    if policies is not None:
        policies = with_times(policies, facts, scale)
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
            info.fidelity if info else None,
            compiled.code if compiled else None,
            policies,
            info.watched if info else None,
        )
    )
    families = count_families(opened, scale) if facts.level != "graphs" else ()
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
        steps=_steps(facts, opened.counts),
        families=families,
        regions=regions,
        cost=cost,
        findings=findings,
        checked=checked,
        ranks=(),
        health=_health(facts),
        environment=environment,
        warnings=_warnings(facts, info),
        cross_check=_cross_check(facts),
        proof=show_proof(opened, regions),
        flops=count_flops(
            facts,
            cost.step_ms if cost else None,
            device_name(facts.trace, environment),
            machine.peak_tflops,
        )
        if priced
        else None,
        memory=memory,
        fidelity=info.fidelity if info else None,
        policies=policies,
        compiled=compiled.code if compiled else None,
        by_design=_by_design(facts, scale),
        watched=info.watched if info else None,
    )
    return replace(result, headline=headline(result))


def _by_design(facts: RecomputeFacts, scale: float) -> tuple[ByDesign, ...]:
    steps = max(1, len(facts.steps))
    return tuple(
        ByDesign(
            function=each.function,
            inside=each.inside,
            forward_per_step=each.forward / steps,
            recomputed_per_step=each.again / steps,
            kernels_per_step=each.kernels / steps,
            recompute_ms_per_step=each.time / 1e6 * scale / steps,
        )
        for each in facts.by_design
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


def _with_sources(
    regions: tuple[Region, ...], sources: Mapping[str, Source], functions: Mapping[str, str]
) -> tuple[Region, ...]:
    """The regions, with what the run's run record knows of their call sites."""

    def sourced(checkpoint: Checkpoint) -> Checkpoint:
        if checkpoint.call_site is None:
            site = functions.get(checkpoint.function or "")
            checkpoint = replace(checkpoint, call_site=site)
        source = sources.get(checkpoint.call_site or "")
        return replace(checkpoint, source=source.statement) if source else checkpoint

    return tuple(
        replace(region, checkpoints=tuple(sourced(c) for c in region.checkpoints))
        for region in regions
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
                duration_ms=(span.end - span.start) / 1e6,
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
            duration_ms=(step.span.end - step.span.start) / 1e6,
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


def _environment(trace: Trace, info: RunInfo | None) -> dict[str, str]:
    environment = dict(info.environment) if info else {}
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


def _warnings(facts: RecomputeFacts, info: RunInfo | None) -> tuple[str, ...]:
    found = list(info.warnings) if info else []
    if info is not None and info.message:
        found.append(info.message)
    return (*found, *doubts(facts))
