"""RS004, RS005, RS006 and RS104: checkpoints across ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from recompute_scan.advise.choice import switch_of, title_of
from recompute_scan.cost.phases import Repeated
from recompute_scan.findings.base import (
    Evidence,
    NotApplicable,
    Rule,
    describe,
    name_some,
    review,
)
from recompute_scan.frameworks.base import CHECKPOINT_DOCS, NON_REENTRANT, SHARDED_DOCS
from recompute_scan.frameworks.registry import find_mechanism
from recompute_scan.result import DOUBLED, Checkpoint, Finding, Region
from recompute_scan.units import first_few, ms, plural, size

# Recomputes per block; one more layer of eight recomputed is more than this.
_UNEVEN = 0.1


@partial(Rule, "RS004", "uneven-recompute", severity="warning", needs="ranks")
def uneven_recompute(evidence: Evidence) -> Iterator[Finding]:
    """Some ranks recompute more of their blocks than others."""
    known = [rank for rank in evidence.ranks if rank.recomputes_per_block is not None]
    if len(known) < 2:
        raise NotApplicable("The traces of two or more ranks with a verdict are needed.")
    recomputes = [rank.recomputes_per_block or 0.0 for rank in known]
    most, least = max(recomputes), min(recomputes)
    if most - least < _UNEVEN:
        return
    busiest = [rank.rank for rank, value in zip(known, recomputes, strict=True) if value == most]
    times = [rank.recompute_ms for rank in known if rank.recompute_ms is not None]
    spread = (
        f" Recomputes take from {min(times):.1f} to {max(times):.1f} ms of a step." if times else ""
    )
    shown = ", ".join(map(str, busiest[:4])) + ", …" * (len(busiest) > 4)
    yield uneven_recompute.finding(
        evidence,
        title=f"Ranks recompute from {least:.2g} to {most:.2g} times per block; "
        f"most on rank{'s' * (len(busiest) > 1)} {shown}",
        detail=(
            "Ranks that work on the same step wait for each other, so the one that recomputes "
            f"most sets the pace for all.{spread} Pipeline stages may differ on purpose: the "
            "first holds the activations of more micro-batches. Otherwise look for a setting "
            "that is not the same on all ranks."
        ),
        evidence=[
            f"rank {rank.rank}: {value:.3g} recomputes per block"
            + ("" if rank.recompute_ms is None else f", {rank.recompute_ms:.1f} ms per step")
            for rank, value in zip(known, recomputes, strict=True)
        ],
    )


_GOES = f" The fix for {DOUBLED} removes them too."


@partial(Rule, "RS005", "repeated-collectives")
def repeated_collectives(evidence: Evidence) -> Iterator[Finding]:
    """Recomputes gather parameters, or communicate otherwise, once more."""
    if not evidence.has_collectives:
        raise NotApplicable("The trace holds no collective communication.")
    if evidence.repeated_gathers.count:
        yield _gathers(evidence, evidence.repeated_gathers)
    if evidence.other_repeated.count:
        yield _others(evidence, evidence.other_repeated)


def _gathers(evidence: Evidence, gathers: Repeated) -> Finding:
    goes = _goes_with_the_fix(evidence)
    return repeated_collectives.finding(
        evidence,
        severity="warning",
        title=f"Recomputes gather parameters again: {gathers.count:g} of "
        f"{evidence.gathers_per_step:g} all-gathers per step",
        detail=(
            "The checkpoint is outside the FSDP unit, so its recompute gathers the unit's "
            "parameters once more than the forward and the backward pass need. "
            f"{_time(gathers)}{_GOES if goes else ''}"
        ),
        evidence=_evidence(gathers),
        fix=None
        if goes
        else review(
            summary=(
                "Use non-reentrant checkpoints inside the FSDP units: FSDP's own wrapper on the "
                "layers, or your framework's setting for it."
            ),
            keep="one checkpoint inside each FSDP unit",
            remove="the checkpoint outside",
            docs=SHARDED_DOCS,
            reason="Which units are checkpointed decides what memory is needed.",
        ),
    )


def _goes_with_the_fix(evidence: Evidence) -> bool:
    """Does the fix for doubled checkpoints take out all checkpoints that gather parameters?

    Without annotations these are not known, and the fix for doubled checkpoints comes first.
    """
    if evidence.verdict != "doubled":
        return False
    if not evidence.annotated:
        return True
    removed = {
        switch_of(evidence.keep_and_drop(region.checkpoints)[1])
        for region in evidence.regions
        if len(region.checkpoints) > 1
    }
    return evidence.gathering <= removed


def _others(evidence: Evidence, others: Repeated) -> Finding:
    return repeated_collectives.finding(
        evidence,
        title=f"Recomputes repeat communication: {others.count:g} collectives per step",
        detail=(
            "The recomputed blocks communicate in their forward, as tensor-parallel and expert "
            f"layers do, and so does every recompute. {_time(others)} Selective checkpointing "
            "that keeps the received tensors avoids it, at a price in memory."
        ),
        evidence=_evidence(others),
    )


def _evidence(found: Repeated) -> list[str]:
    said = [f"{name}: {number:g} per step inside recomputes" for name, number in found.names]
    if found.bytes is not None:
        said.append(
            f"{size(found.bytes)} per step: of each collective the larger of input and output"
        )
    if found.exposed_ms is not None:
        said.append(f"{ms(found.exposed_ms)} per step with no computation at the same time")
    return said


def _time(found: Repeated) -> str:
    taken = f"{found.time_ms:.3g} ms of a recorded step"
    if found.on_device:
        return f"They take {taken}."
    return (
        f"To start them takes the host {taken}; how long the step then waits for them is not in "
        "the trace."
    )


@partial(Rule, "RS006", "reentrant-under-fsdp", severity="warning")
def reentrant_under_fsdp(evidence: Evidence) -> Iterator[Finding]:
    """A reentrant checkpoint under FSDP, which advice on doubling would leave in place."""
    if not evidence.run.sharded:
        raise NotApplicable("The trace shows no FSDP.")
    kept: dict[Checkpoint, list[Region]] = defaultdict(list)
    for region in evidence.regions:
        if not region.checkpoints or not region.recompute_runs_per_backward:
            continue
        stays = region.checkpoints[0]
        if len(region.checkpoints) > 1:
            stays = evidence.keep_and_drop(region.checkpoints)[0]
        if stays.variant == "reentrant":
            kept[stays].append(region)
    yield from (_reentrant(evidence, checkpoint, some) for checkpoint, some in kept.items())


def _reentrant(evidence: Evidence, checkpoint: Checkpoint, regions: list[Region]) -> Finding:
    mechanism = find_mechanism(checkpoint.mechanism)
    return reentrant_under_fsdp.finding(
        evidence,
        title=f"{evidence.of_blocks(regions)} are checkpointed reentrantly under FSDP",
        detail=(
            "A reentrant recompute runs the whole block, does not compare what it recomputed with "
            "the original, and outside an FSDP unit gathers the parameters once more. With "
            "fully_shard its memory has been reported to grow (pytorch/pytorch issue 169349). "
            "PyTorch advises against the variant."
        ),
        evidence=(describe(checkpoint), *name_some(regions)),
        fix=review(
            summary=(
                "Use the non-reentrant variant: pass use_reentrant=False where "
                f"{title_of(checkpoint)} is switched on, or use FSDP's own wrapper."
            ),
            keep="one non-reentrant checkpoint around each block",
            remove="use_reentrant=True, or a default that means it",
            docs=mechanism.docs if mechanism else CHECKPOINT_DOCS,
            reason=(
                f"{NON_REENTRANT} A non-reentrant checkpoint raises an error if a recompute's "
                "shapes or dtypes differ; a reentrant one goes on with wrong gradients."
            ),
        ),
    )


_MOST_NAMED = 6


@partial(Rule, "RS104", "checkpoint-without-gradient", severity="warning", needs="run")
def checkpoint_without_gradient(evidence: Evidence) -> Iterator[Finding]:
    """Weights inside a reentrant checkpoint that get no gradient, though nothing fails."""
    modules = evidence.untrained
    if modules is None:
        raise NotApplicable("Only `recompute-scan run` sees which weights have a gradient.")
    weights = evidence.fidelity.untrained if evidence.fidelity is not None else ()
    # A weight of a module that is named is no news.
    known = tuple(f"{name}." for name in modules)
    alone = tuple(one for one in weights if not one.startswith(known))
    if not (modules or alone):
        return
    # The reader of logs is loaded where there is something to say.
    from recompute_scan.diagnose.checkpoint_errors import SILENT  # noqa: PLC0415 - above
    from recompute_scan.diagnose.outcome import Diagnosis, finding_of  # noqa: PLC0415 - above

    seen = [
        f"after a backward pass, {what} {first_few(some, _MOST_NAMED)}"
        for what, some in (
            ("no weight has a gradient in", modules),
            (f"{plural(len(alone), 'weight')} without a gradient:", alone),
        )
        if some
    ]
    yield finding_of(Diagnosis(SILENT, "high", tuple(seen)))
