"""Fixed terms as a person reads them, and the count that anyone can redo: the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from msgspec import Struct

from recompute_scan.annotations import COMPILED
from recompute_scan.frameworks.registry import find_title
from recompute_scan.result import (
    Checkpoint,
    Cost,
    EvidenceLevel,
    Fix,
    Result,
    Verdict,
)
from recompute_scan.units import UNKNOWN, count, ms, plural, size

COLUMNS = (
    "Operator",
    "Outside the backward pass",
    "Inside it",
    "By gradient hooks",
    "Matched with the forward pass",
)
HOW = (
    "Operators that only a forward pass has, counted over the whole trace by name and time alone. "
    "An operator is inside the backward pass if it starts within a range of the autograd engine on "
    "its thread. Work without gradients is left out, unless an autograd function calls it."
)
_AGREES = {True: "agrees", False: "differs", None: "nothing to count"}
_NO_COUNT = "no answer"
# A number of recomputes that is this near to 1 is shown as 1.
_ONE = 0.005
SAME_LANES = "The same operators run in every lane."
VERDICT_WORDS: dict[Verdict, str] = {
    "none": "none (nothing recomputed)",
    "partial": "partial (some recomputed, once)",
    "full": "full (recomputed once)",
    "doubled": "doubled (recomputed more than once)",
    "inconclusive": "inconclusive",
}


class Said(Struct, frozen=True):
    """A fixed sentence, or part of one, and what makes it true of a result.

    It is printed by :func:`all_true` and :func:`first_true` only, and so where it is true. ``text``
    occurs nowhere else.
    """

    text: str
    true: Callable[[Result], bool]


def all_true(result: Result, said: Iterable[Said]) -> str:
    """Those that are true of the result, in order; empty for none."""
    return " ".join(one.text for one in said if one.true(result))


def first_true(result: Result, said: Iterable[Said]) -> str:
    """The first that is true of the result; empty for none."""
    return next((one.text for one in said if one.true(result)), "")


def by_checkpoints(result: Result) -> bool:
    """Whether checkpoints made forward work run again: in blocks or compiled code, or, where
    neither is known, whenever something ran again.
    """
    code = result.compiled.graphs if result.compiled else ()
    if any(region.recompute_runs_per_backward for region in result.regions):
        return True
    if any(one.why == "checkpoint" for graph in code for one in graph.recomputes):
        return True
    unknown = not result.regions and not code and not result.by_design
    return unknown and bool(result.recompute_per_backward)


def _by_compiler(result: Result) -> bool:
    code = result.compiled.graphs if result.compiled else ()
    return not by_checkpoints(result) and any(graph.recomputes for graph in code)


def _by_design(result: Result) -> bool:
    others = any(each.inside != (each.function,) for each in result.by_design)  # not reversible
    return others and not by_checkpoints(result) and not _by_compiler(result)


def _partly(result: Result) -> bool:
    asked = result.verdict == "partial" and by_checkpoints(result)
    return asked and _in_blocks(result) and not _in_parts(result)


def _idle_steps(result: Result) -> bool:
    return any(one.complete and one.forward_ops and not one.recomputed_ops for one in result.steps)


def _in_blocks(result: Result) -> bool:
    """Whether operators were counted, so that more is known than of kernels or graphs alone."""
    return result.evidence_level in ("annotated", "autograd")


def _not_doubled(result: Result) -> bool:
    """Whether there is a verdict, and it is another."""
    return result.verdict in ("none", "partial", "full")


def _of_graphs(result: Result) -> bool:
    return result.evidence_level == "graphs"


def _advised(result: Result) -> bool:
    return bool(result.findings) or result.plan is not None or result.crash is not None


def _can_save(result: Result) -> bool:
    """Whether a finding says that time can be saved, or that gradients are wrong."""
    return any(one.saving_ms or one.wrong_gradients for one in result.findings)


def _around_one_block(result: Result) -> bool:
    """Whether all checkpoints of doubled blocks are known, and each is around one block."""
    stacks = [r.checkpoints for r in result.regions if r.recompute_runs_per_backward > 1]
    return bool(stacks) and all(
        len(stack) > 1 and all(one.around == "block" for one in stack) for stack in stacks
    )


def _checkpointed(result: Result) -> bool:
    return any(region.checkpoints for region in result.regions)


def _in_parts(result: Result) -> bool:
    """Whether all that ran again did so in functions that go through their block in parts."""
    found = [r.checkpoints for r in result.regions if r.recompute_runs_per_backward]
    return bool(found) and all(stack and "in-parts" in stack[-1].options for stack in found)


def _several_passes(result: Result) -> bool:
    return any(region.backward_passes >= 2 for region in result.regions)


# The meaning of the verdict: all that are true.
MEANING = (
    Said(
        "Activation checkpointing needs one recompute of a block in the backward pass. Here the "
        "same work ran again more often than that.",
        lambda r: r.verdict == "doubled",
    ),
    Said(
        "The recomputes after the first take time, and around the same block they free no further "
        "memory.",
        lambda r: r.verdict == "doubled" and _around_one_block(r),
    ),
    Said(
        "The recomputes after the first take time. Whether they also save memory depends on what "
        "each checkpoint is around.",
        lambda r: r.verdict == "doubled" and not _around_one_block(r),
    ),
    Said(
        "The work that ran again did so exactly once in the backward pass. That is the price "
        "of ordinary activation checkpointing, paid once.",
        lambda r: r.verdict == "full" and _in_blocks(r) and not _several_passes(r),
    ),
    Said(
        "Several backward passes went through a checkpointed block, and each ran it again once. A "
        "single backward pass over the sum of the losses runs it again once in all.",
        lambda r: r.verdict == "full" and _in_blocks(r) and _several_passes(r),
    ),
    Said(
        "Some blocks, or some of their operators, ran again once in each backward pass; the rest "
        "kept its results.",
        lambda r: _partly(r) and not _idle_steps(r),
    ),
    Said(
        "An autograd function of the script runs its own block again for its gradient, part by "
        "part. That is how it is written, and no setting turned it on.",
        lambda r: r.verdict == "partial" and _in_blocks(r) and _in_parts(r),
    ),
    Said(
        "The compiler runs these operators again by its own choice; no checkpoint asked for it.",
        lambda r: r.verdict == "partial" and _by_compiler(r),
    ),
    Said(
        "One autograd function runs another one's forward again in its gradient instead of "
        "keeping the results. The model is written that way; no setting turned it on.",
        lambda r: r.verdict == "partial" and _by_design(r),
    ),
    Said(
        "No block ran again in the backward pass: no activation checkpoint was at work.",
        lambda r: r.verdict == "none" and _in_blocks(r) and not _checkpointed(r),
    ),
    Said(
        "Checkpoints were called, and the backward pass asked for nothing inside them.",
        lambda r: r.verdict == "none" and _in_blocks(r) and _checkpointed(r),
    ),
    Said(
        "No kernel that could be counted ran again in the backward pass.",
        lambda r: r.verdict == "none" and r.evidence_level == "kernels",
    ),
    Said(
        "Kernels show attention only: a checkpoint that keeps attention's results is not seen.",
        lambda r: _not_doubled(r) and r.evidence_level == "kernels",
    ),
    Said(
        "This comes from the compiler's graphs. They do not show how often each graph runs, or "
        "which code runs outside them.",
        lambda r: _not_doubled(r) and _of_graphs(r),
    ),
    Said(
        "Nor do these logs show whether checkpoints are around compiled code, which would run all "
        "of it once more. A recording by recompute-scan run does.",
        lambda r: _not_doubled(r) and _of_graphs(r) and r.confidence == "low",
    ),
    Said(
        "Work outside of these blocks was not counted.",
        lambda r: r.verdict in ("partial", "full") and r.evidence_level == "hooks",
    ),
    Said(
        "No checkpoint needs a change.",
        lambda r: (
            _in_blocks(r)
            and not _advised(r)
            and (r.verdict == "none" or (r.verdict == "partial" and not by_checkpoints(r)))
        ),
    ),
    Said(
        "No recompute is redundant.",
        lambda r: (
            r.verdict in ("partial", "full")
            and _in_blocks(r)
            and by_checkpoints(r)
            and not _can_save(r)
        ),
    ),
    Said(
        "The recording does not show whether forward work ran again in the backward pass, so this "
        "page cannot say whether checkpointing is doubled.",
        lambda r: r.verdict == "inconclusive",
    ),
)
# Notes on a number that is not known.
UNKNOWN_NOTE = (
    Said("these logs do not show it", _of_graphs),
    Said("the trace does not show it", lambda r: not _of_graphs(r) and r.evidence_level != "hooks"),
    Said("hooks count and time nothing", lambda r: r.evidence_level == "hooks"),
)
# Notes on the number of recomputes: the first that is true.
RECOMPUTES_NOTE = (
    Said(UNKNOWN_NOTE[0].text, lambda r: r.recompute_per_backward is None and _of_graphs(r)),
    Said(UNKNOWN_NOTE[1].text, lambda r: r.recompute_per_backward is None),
    Said(
        "ordinary checkpointing needs 1; every further one is redundant",
        lambda r: r.verdict == "doubled" and _around_one_block(r),
    ),
    Said("ordinary checkpointing needs 1", lambda r: r.verdict == "doubled"),
    Said("no forward work ran again in the backward pass", lambda r: r.recompute_per_backward == 0),
    Said("of some functions, by the model's own design", _by_design),
    Said("of operators that the compiler runs again; no checkpoint asked for it", _by_compiler),
    Said(
        "what ordinary checkpointing needs",
        lambda r: (
            r.verdict != "partial"
            and by_checkpoints(r)
            and abs((r.recompute_per_backward or 0) - 1) < _ONE
        ),
    ),
    Said("at most; ordinary checkpointing needs 1", lambda r: bool(r.recompute_per_backward)),
)
# Notes on the share of a step where nothing is redundant.
SHARE_NOTE = (
    Said(
        "spent on recomputes that save memory",
        lambda r: by_checkpoints(r) and bool(r.cost and r.cost.recompute_ms > 0),
    ),
    Said("spent on recomputes", lambda r: r.cost is not None),
)
NOT_CERTAIN = "a saving is not certain"
OWN_ARGUMENTS = "Add the script's own arguments, if any: the result does not hold them."
# Notes on the step's time where no fix changes it.
STEP_NOTE = (
    Said("no saving is predicted", lambda r: r.verdict == "doubled"),
    Said("stays as it is: no recompute is redundant", lambda r: not _can_save(r)),
    Said("no recompute is redundant; the findings say what can be mended", _can_save),
)
# The purpose of the commands under "How to check it".
CHECKING = (Said("There is nothing to repair.", lambda r: _not_doubled(r) and not _advised(r)),)
NO_CALL_SITES = (
    Said(
        "Hooks counted the runs of blocks, and do not show what checkpoints them.",
        lambda r: r.evidence_level == "hooks" and not _checkpointed(r),
    ),
    Said(
        "The trace does not name the checkpoints. Traces recorded by `recompute-scan run` do, "
        "with file and line.",
        lambda r: by_checkpoints(r) and not _checkpointed(r) and r.evidence_level != "annotated",
    ),
    Said("The trace does not name the checkpoints.", lambda r: not _checkpointed(r)),
)
# The end of the bars' sentence on recomputes where not one is redundant.
NEEDED = (
    Said("recomputes that checkpointing needs to save memory", by_checkpoints),
    Said("recomputes that no checkpoint asked for", lambda r: not by_checkpoints(r)),
)
# Of these groups the first that is true is printed, of MEANING all that are.
FIRST_TRUE = (NEEDED, UNKNOWN_NOTE, RECOMPUTES_NOTE, SHARE_NOTE, STEP_NOTE, CHECKING, NO_CALL_SITES)
FIXED = (*MEANING, *(said for group in FIRST_TRUE for said in group))


EVIDENCE_WORDS: dict[EvidenceLevel, str] = {
    "annotated": "every checkpointed call has an annotation",
    "autograd": "operators and autograd nodes in the trace were matched, without annotations",
    "kernels": "kernels were counted by their names; this trace's operators do not show the model",
    "graphs": "compiled code was counted from the compiler's own graphs alone",
    "hooks": "runs of checkpointed blocks were counted by hooks in one step, and not in a trace",
}
PART_WORDS = {
    "forward": "Forward pass",
    "recompute": "Needed recomputes",
    "redundant": "Redundant recomputes",
    "backward": "Backward pass",
    "optimizer": "Optimizer",
    "other": "Everything else",
}
PART_SHORT = {
    "forward": "Forward",
    "recompute": "Recompute",
    "redundant": "Redundant",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "other": "Other",
}
_SAFE = "safe; the results of training cannot change"
_REVIEW = "review it before you apply it"
KIND_WORDS = {"raised": "failed", "exited": "failed", "hung": "hung", "killed": "killed"}
STATUS_WORDS = {
    "found": "found",
    "clean": "clean",
    "not-applicable": "not applicable",
    "error": "not checked",
}


def one_line(source: str | None) -> str:
    """A statement of source code on one line, for places that have only one."""
    joined = " ".join((source or "").split())
    return re.sub(r"([(\[{]) | ?,? (?=[)\]}])", r"\1", joined)


def family_words(family: str) -> str:
    """A family of operators, as it is commonly called."""
    return "matmul" if family == "gemm" else family


def mechanism_words(checkpoint: Checkpoint) -> str:
    """How a checkpoint was switched on, in words; unknown mechanisms as they are named."""
    if checkpoint.mechanism is None:
        own = f"a checkpoint function of your own ({checkpoint.function})"
        return own if checkpoint.function else "mechanism not known"
    text = find_title(checkpoint.mechanism) or checkpoint.mechanism
    return f"{text} ({checkpoint.function})" if checkpoint.function else text


def variant_words(checkpoint: Checkpoint) -> str:
    """``reentrant``, ``non-reentrant``, ``compiled`` or that it is not known; and around what, if
    not around each block.
    """
    variant = COMPILED if COMPILED in checkpoint.options else checkpoint.variant
    extent = "" if checkpoint.around == "block" else f", {checkpoint.extent}"
    return f"{variant or 'variant not known'}{extent}"


def risk_words(fix: Fix) -> str:
    """Whether a fix may be applied unseen, and why not."""
    if fix.disposition == "safe":
        return _SAFE
    return f"{_REVIEW}. {fix.reason}" if fix.reason else f"{_REVIEW}."


def place_words(depth: int, total: int) -> str:
    """``outer``, ``inner`` or ``only``, for a checkpoint among ``total`` around one block."""
    if total <= 1:
        return "only"
    if depth == 0:
        return "outer"
    return "inner" if depth == total - 1 else "middle"


def device_words(result: Result) -> str:
    """The device that the step was measured on, for use after "on", and whether it waits.

    A name of a device is not escaped.
    """
    if result.cost is None:
        return UNKNOWN
    facts = result.environment
    gpu = facts.get("device_name") or facts.get("gpu", "").rpartition(" x ")[2]
    if result.cost.device == "gpu":
        return gpu or "the GPU"
    return f"{gpu}, which often waits for the CPU" if gpu else "the CPU"


def collectives_words(cost: Cost) -> str:
    """``13 per step, 52.0 MiB, 4.10 ms, 1.20 ms with no computation at the same time``."""
    if cost.repeated_collectives_ms is None or cost.repeated_collectives_count == 0:
        return "none"
    said = [ms(cost.repeated_collectives_ms)]
    if cost.repeated_collectives_bytes is not None:
        said.insert(0, size(cost.repeated_collectives_bytes))
    if cost.repeated_collectives_count is not None:
        said.insert(0, f"{count(cost.repeated_collectives_count)} per step")
    if cost.repeated_collectives_exposed_ms is not None:
        said.append(
            f"{ms(cost.repeated_collectives_exposed_ms)} with no computation at the same time"
        )
    return ", ".join(said)


def plain_count_row(result: Result) -> tuple[str, str] | None:
    """Does the plain count agree, and the numbers of its clearest operator."""
    check = result.cross_check
    if check is None:
        return None
    # The first operator that differs, else the first.
    shown = next(iter(check.counts), None)
    if check.agrees is False:
        shown = next((row for row in check.counts if row.inside != row.matched), shown)
    if shown is None:
        return _AGREES[check.agrees], "no operator that only a forward pass has"
    name = shown.name.removeprefix("aten::")
    # A checkpoint of a single operator stops as soon as that has its inputs again.
    began = check.agrees and result.verdict == "none" and shown.inside > shown.in_hooks
    # The answer to compare it with says nothing, unless it says that the two differ.
    alone = check.agrees and result.verdict == "inconclusive"
    return (
        _NO_COUNT if alone else _AGREES[check.agrees],
        f"{plural(shown.inside, 'call')} of {name} inside the backward pass"
        f"{' that all stopped before their end' if began else ''} and "
        f"{count(shown.outside)} outside it, with gradients",
    )


def plain_count_table(result: Result) -> list[tuple[str, ...]]:
    """One row per operator, in the order of :data:`COLUMNS`."""
    return [
        (
            row.name,
            *(count(number) for number in (row.outside, row.inside, row.in_hooks, row.matched)),
        )
        for row in (result.cross_check.counts if result.cross_check else ())
    ]
