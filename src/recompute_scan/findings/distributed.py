"""RS004, RS005, RS006 and RS104: checkpoints across ranks.

RS004: some ranks recompute more of their blocks than others.

RS005: recomputes gather parameters, or communicate otherwise, once more.

RS006: a reentrant checkpoint under FSDP.

RS104: weights inside a reentrant checkpoint that get no gradient, though nothing fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from recompute_scan.advise import find_mechanism, switch_of, title_of
from recompute_scan.cost.phases import Repeated
from recompute_scan.findings.base import (
    Answer,
    Evidence,
    NotApplicable,
    Rule,
    describe,
    name_some,
    review,
)
from recompute_scan.frameworks.base import CHECKPOINT_DOCS, NON_REENTRANT, SHARDED_DOCS
from recompute_scan.result import DOUBLED, Checkpoint, Finding, Region
from recompute_scan.units import first_few, ms, plural, size

# Recomputes per block; one more layer of eight recomputed is more than this.
_UNEVEN = 0.1


def check_ranks(evidence: Evidence) -> Answer:
    """One finding where the ranks' recomputes per block differ."""
    known = [rank for rank in evidence.ranks if rank.recomputes_per_block is not None]
    if len(known) < 2:
        return NotApplicable("The traces of two or more ranks with a verdict are needed.")
    recomputes = [rank.recomputes_per_block or 0.0 for rank in known]
    most, least = max(recomputes), min(recomputes)
    if most - least < _UNEVEN:
        return []
    busiest = [rank.rank for rank, value in zip(known, recomputes, strict=True) if value == most]
    times = [rank.recompute_ms for rank in known if rank.recompute_ms is not None]
    spread = (
        f" Recomputes take from {min(times):.1f} to {max(times):.1f} ms of a step." if times else ""
    )
    return [
        RS004.finding(
            evidence,
            title=f"Ranks recompute from {least:.2g} to {most:.2g} times per block; "
            f"most on {_listed(busiest)}",
            detail=(
                "Ranks that work on the same step wait for each other, so the one that recomputes "
                f"most sets the pace for all.{spread} Pipeline stages may differ on purpose: the "
                "first holds the activations of more micro-batches. Otherwise look for a setting "
                "that is not the same on all ranks."
            ),
            evidence=[
                f"rank {rank.rank}: {value:.3g} recomputes per block"
                + (
                    f", {rank.recompute_ms:.1f} ms per step"
                    if rank.recompute_ms is not None
                    else ""
                )
                for rank, value in zip(known, recomputes, strict=True)
            ],
        )
    ]


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


RS004 = Rule(
    "RS004",
    "uneven-recompute",
    check_ranks,
    severity="warning",
    needs="ranks",
)


_GOES = f" The fix for {DOUBLED} removes them too."


def check_repeated_collectives(evidence: Evidence) -> Answer:
    """One finding for gathers of parameters inside recomputes, and one for other communication."""
    if not evidence.has_collectives:
        return NotApplicable("The trace holds no collective communication.")
    found = []
    if evidence.repeated_gathers.count:
        found.append(_gathers(evidence, evidence.repeated_gathers))
    if evidence.other_repeated.count:
        found.append(_others(evidence, evidence.other_repeated))
    return found


def _gathers(evidence: Evidence, gathers: Repeated) -> Finding:
    goes = _goes_with_the_fix(evidence)
    return RS005.finding(
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
    return RS005.finding(
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


RS005 = Rule("RS005", "repeated-collectives", check_repeated_collectives)


def check_reentrant_under_fsdp(evidence: Evidence) -> Answer:
    """One finding for each reentrant checkpoint that advice on doubling would leave in place."""
    if not evidence.run.sharded:
        return NotApplicable("The trace shows no FSDP.")
    kept: dict[Checkpoint, list[Region]] = defaultdict(list)
    for region in evidence.regions:
        if not region.checkpoints or not region.recompute_runs_per_backward:
            continue
        stays = region.checkpoints[0]
        if len(region.checkpoints) > 1:
            stays = evidence.keep_and_drop(region.checkpoints)[0]
        if stays.variant == "reentrant":
            kept[stays].append(region)
    return [_finding(evidence, checkpoint, regions) for checkpoint, regions in kept.items()]


def _finding(evidence: Evidence, checkpoint: Checkpoint, regions: list[Region]) -> Finding:
    mechanism = find_mechanism(checkpoint.mechanism)
    return RS006.finding(
        evidence,
        title=f"{evidence.of_blocks(regions)} are checkpointed reentrantly under FSDP",
        detail=(
            "A reentrant recompute runs the whole block, does not compare what it recomputed with "
            "the original, and outside an FSDP unit gathers the parameters once more. With "
            "fully_shard its memory has been reported to grow (pytorch/pytorch issue 169349). "
            "PyTorch advises against the variant."
        ),
        evidence=(
            describe(checkpoint),
            *name_some(regions),
        ),
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


RS006 = Rule("RS006", "reentrant-under-fsdp", check_reentrant_under_fsdp, severity="warning")


_MOST_NAMED = 6


def check_untrained_weights(evidence: Evidence) -> Answer:
    """One finding, where the run saw trainable weights without a gradient."""
    names = evidence.untrained
    weights = evidence.fidelity.untrained if evidence.fidelity is not None else ()
    # A weight of a module that is named is no news.
    known = tuple(f"{name}." for name in names or ())
    modules = names or ()
    alone = tuple(one for one in weights if not one.startswith(known))
    if names is None:
        return NotApplicable("Only `recompute-scan run` sees which weights have a gradient.")
    if not (modules or alone):
        return []
    # The reader of logs is loaded where there is something to say.
    from recompute_scan.diagnose.checkpoint_errors import SILENT  # noqa: PLC0415 - above
    from recompute_scan.diagnose.outcome import (  # noqa: PLC0415 - above
        Diagnosis,
        finding_of,
        how_checked,
    )

    seen = [
        f"after a backward pass, {what} {first_few(some, _MOST_NAMED)}"
        for what, some in (
            ("no weight has a gradient in", modules),
            (f"{plural(len(alone), 'weight')} without a gradient:", alone),
        )
        if some
    ]
    shown = (*seen, how_checked(SILENT))
    return [finding_of(Diagnosis(SILENT, "high", shown))]


RS104 = Rule(
    "RS104", "checkpoint-without-gradient", check_untrained_weights, severity="warning", needs="run"
)
