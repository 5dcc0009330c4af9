"""RS001, RS002, RS003 and RS008: checkpoints that recompute too much or too little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from recompute_scan.advise.choice import (
    advise_removal,
    mechanism_of,
    place,
    switch_of,
    take_out,
    title_of,
)
from recompute_scan.annotations import EARLY_STOP_OFF
from recompute_scan.findings.base import (
    Evidence,
    NotApplicable,
    Rule,
    Stack,
    describe,
    name_some,
    review,
)
from recompute_scan.frameworks import pytorch
from recompute_scan.result import DOUBLED, Checkpoint, Finding, Fix, Region
from recompute_scan.result.run_record import SwitchedOn
from recompute_scan.units import plural

# A mean below this is one recompute with noise; from here on, some passes of a layer ran twice.
_MORE_THAN_ONCE = 1.5
_MOST_SHOWN = 3


@partial(Rule, DOUBLED, "doubled-checkpoint", severity="error")
def doubled_checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """Forward work runs again more than once in its backward pass."""
    if evidence.verdict == "doubled":
        stacks = evidence.stacks(lambda r: r.recompute_runs_per_backward >= _MORE_THAN_ONCE)
        for stack, regions in (stacks or {(): []}).items():
            yield _doubled(evidence, stack, regions)


def _doubled(evidence: Evidence, stack: Stack, regions: list[Region]) -> Finding:
    cost = evidence.cost
    runs = max((r.recompute_runs_per_backward for r in regions), default=evidence.highest)
    whole = evidence.of_blocks(regions) if regions else "Some operators"
    times = f"{runs:g} times" if runs is not None else "more than once"
    part = "a part of " if regions and all(region.in_part for region in regions) else ""
    title = f"{whole} run {part}their forward again {times} in each backward pass; once is enough"
    redundant, everything = (
        sum(region.redundant_ms_per_step for region in some) for some in (regions, evidence.regions)
    )
    share = redundant / everything if regions and everything else 1.0
    counted = _counted(regions)
    return doubled_checkpoint.finding(
        evidence,
        title=title,
        detail=_detail(stack),
        evidence=(
            *map(describe, stack),
            *counted[:_MOST_SHOWN],
            *([f"{len(counted) - _MOST_SHOWN} more"] if len(counted) > _MOST_SHOWN else []),
        ),
        fix=advise_removal(stack, evidence.sources, evidence.alone, evidence.run),
        saving_ms=(cost.step_ms - cost.predicted_step_ms) * share if cost else None,
        saving_pct=cost.saving_pct * share if cost else None,
    )


def _detail(stack: Stack) -> str:
    if len(stack) >= 2:
        titles = list(dict.fromkeys(title_of(checkpoint) for checkpoint in stack[:2]))
        names = " and ".join(titles)
        if len(titles) == 1:
            known = stack[0].mechanism is not None
            names = f"{len(stack)} checkpoints" + (f" of {titles[0]}" if known else "")
        return (
            f"{names} enclose the same work. Each of them runs the forward again in the "
            "backward pass, so all but one of these runs are wasted."
        )
    if len(stack) == 1 and stack[0].call_site:
        return (
            "One checkpoint is known to enclose this work. Its backward pass may come in parts, as "
            "where a pipeline schedule gets the gradients of inputs and of weights apart, or "
            "autograd.grad is called for one group of weights after the other. Each part then runs "
            "the whole forward again; one backward pass for all needs no further run. Otherwise a "
            "second checkpoint encloses it that the recording could not name."
        )
    return (
        "More than one checkpoint encloses this work, and each runs the forward again in the "
        "backward pass. All but one of these runs are wasted."
    )


def _counted(regions: Sequence[Region]) -> list[str]:
    """A line for each module; one that is called in several places has a region at each."""
    runs: dict[tuple[str, float], float] = defaultdict(float)
    for one in regions:
        name = one.module or f"block {one.ordinal}"
        runs[name, one.recompute_runs_per_backward] += one.forward_runs_per_step
    return [
        f"{name}: {plural(number, 'forward run')} per step, {plural(again, 'recompute')} of each"
        for (name, again), number in runs.items()
    ]


@partial(Rule, "RS002", "nested-checkpoint")
def nested_checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """Two checkpoints enclose the same work, and one of them happens to cost nothing."""
    if not evidence.annotated and evidence.verdict != "none":
        raise NotApplicable(
            "A nested checkpoint that recomputes nothing shows only in a trace that "
            "`recompute-scan run` recorded."
        )
    stacks = evidence.stacks(
        lambda r: (
            len(r.checkpoints) >= 2
            and 0 < r.recompute_runs_per_backward < _MORE_THAN_ONCE
            and all(one.variant == "non-reentrant" for one in r.checkpoints[:2])
        )
    )
    for stack, regions in stacks.items():
        outer, inner = title_of(stack[0]), title_of(stack[1])
        yield nested_checkpoint.finding(
            evidence,
            title=f"{evidence.of_blocks(regions)} have {len(stack)} checkpoints "
            "around them, and recompute once",
            detail=(
                f"{outer} encloses {inner}. Both are non-reentrant and stop early, so the outer "
                "recompute ends before the inner work begins, and today the second one costs "
                "nothing. With a reentrant variant, or with early stop off, every block would run "
                "twice."
            ),
            evidence=[*map(describe, stack)],
            fix=advise_removal(stack, evidence.sources, evidence.alone, evidence.run),
            saving_ms=0.0,
            saving_pct=0.0,
        )


@partial(Rule, "RS003", "idle-checkpoint")
def idle_checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """Checkpointing is switched on and recomputes nothing."""
    if not evidence.annotated and not evidence.switched_on:
        raise NotApplicable(
            "A checkpoint that recomputes nothing shows only in a trace that `recompute-scan run` "
            "recorded."
        )
    stacks = evidence.stacks(lambda r: bool(r.checkpoints) and r.recompute_runs_per_backward == 0)
    for stack, regions in stacks.items():
        blocks = evidence.of_blocks(regions)
        yield idle_checkpoint.finding(
            evidence,
            title=f"{blocks} are checkpointed and nothing in them is recomputed",
            detail=(
                "The backward pass asked for nothing inside these blocks: all that they save is "
                "their own input, or something else takes their tensors first, such as "
                "save_on_cpu. The checkpoint frees no memory here, and costs a little host time."
            ),
            evidence=[*map(describe, stack), *name_some(regions)],
            fix=_fix(evidence, stack),
        )
    # A compiled checkpoint is part of the graph and calls nothing. A function that the code brings
    # may be put in place of a switch's checkpoint, as functions that offload are.
    compiled = evidence.environment.get("torch_compile") == "used"
    if not compiled and pytorch.OWN.name not in evidence.mechanisms:
        unused = [one for one in evidence.switched_on if one.mechanism not in evidence.mechanisms]
        yield from (_unused(evidence, one) for one in unused)


def _fix(evidence: Evidence, stack: Stack) -> Fix | None:
    if len(stack) > 1:
        return advise_removal(stack, evidence.sources, evidence.alone, evidence.run)
    mechanism = mechanism_of(stack[0])
    if mechanism is None:
        return None
    works = any(
        region.recompute_runs_per_backward > 0
        and switch_of(stack[0]) in map(switch_of, region.checkpoints)
        for region in evidence.regions
    )
    return take_out(stack[0], mechanism, evidence.sources, lost=works, run=evidence.run)


def _unused(evidence: Evidence, switched: SwitchedOn) -> Finding:
    title = title_of(Checkpoint(0, None, switched.mechanism))
    where = place(switched.site)
    return idle_checkpoint.finding(
        evidence,
        severity="warning",
        title=f"{title[:1].upper()}{title[1:]} is switched on{where}, and no checkpoint was called",
        detail=(
            "None of the recorded steps called a checkpoint of this kind. The model may be in "
            "evaluation mode (call model.train()), its layers may not take part in these steps, "
            "or its code may never ask for the checkpoint. So it frees no memory."
        ),
        evidence=(f"{title}: on when recording began{where}, 0 calls",),
    )


@partial(Rule, "RS008", "early-stop-off")
def early_stop_off(evidence: Evidence) -> Iterator[Finding]:
    """Non-reentrant recomputes run to the end of their block, because early stop is off."""
    if not evidence.annotated and evidence.verdict != "none":
        raise NotApplicable(
            "Whether early stop was on shows only in a trace that `recompute-scan run` recorded."
        )
    found = {
        checkpoint: None
        for region in evidence.regions
        for checkpoint in region.checkpoints
        if EARLY_STOP_OFF in checkpoint.options and region.recompute_runs_per_backward
    }
    off: dict[tuple[str | None, str | None], list[Checkpoint]] = defaultdict(list)
    for checkpoint in found:
        off[checkpoint.mechanism, checkpoint.function].append(checkpoint)
    yield from (_runs_on(evidence, checkpoints) for checkpoints in off.values())


def _runs_on(evidence: Evidence, checkpoints: list[Checkpoint]) -> Finding:
    regions = [r for r in evidence.regions if not set(checkpoints).isdisjoint(r.checkpoints)]
    title = title_of(checkpoints[0])
    nested = any(len(region.checkpoints) > 1 for region in regions)
    return early_stop_off.finding(
        evidence,
        severity="warning" if nested else "info",
        title=f"{evidence.of_blocks(regions)} are recomputed to their end: early stop is off",
        detail=(
            "A non-reentrant recompute may stop as soon as it has the last tensor that the "
            "backward pass needs, which leaves out a block's last operators. Here it goes on to "
            "the end."
            + (
                " Around another non-reentrant checkpoint, it also recomputes the block a second "
                "time."
                if nested
                else ""
            )
        ),
        evidence=(*map(describe, checkpoints), *name_some(regions)),
        fix=review(
            summary=(
                "Leave early stop on: no set_checkpoint_early_stop(False) and no "
                f"early_stop=False in {title}."
            ),
            keep=title,
            remove="early_stop=False, or set_checkpoint_early_stop(False)",
            reason=(
                "Some frameworks turn it off so that hooks and side effects at the end of a "
                "block run in each recompute."
            ),
        ),
    )
