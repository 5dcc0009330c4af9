"""Fixed terms as a person reads them, and the count that anyone can redo: the same everywhere."""

from __future__ import annotations

import re

from recompute_scan.annotations import COMPILED
from recompute_scan.frameworks.known import find_title
from recompute_scan.result import (
    Checkpoint,
    Cost,
    CrossCheck,
    EvidenceLevel,
    Fix,
    PlainCount,
    Result,
    Verdict,
)
from recompute_scan.units import UNKNOWN, count, ms, plural, size

COLUMNS = (
    "Operator",
    "Outside the backward pass",
    "Inside it",
    "By gradient hooks",
    "Recomputed, as the answer says",
)
HOW = (
    "Operators that only a forward pass has, counted over the whole trace by name and time alone. "
    "An operator is inside the backward pass if it starts within a range of the autograd engine on "
    "its thread. Work without gradients is left out, except for that of autograd functions."
)
_AGREES = {True: "agrees", False: "differs", None: "nothing to count"}
VERDICT_WORDS: dict[Verdict, str] = {
    "none": "none (nothing recomputed)",
    "partial": "partial (some recomputed, once)",
    "full": "full (all recomputed, once)",
    "doubled": "doubled (recomputed more than once)",
    "inconclusive": "inconclusive",
}
NOTHING_TO_CHANGE = "Nothing is wasted, and there is nothing to change."
VERDICT_MEANING: dict[Verdict, str] = {
    "none": (
        "The forward pass of every block ran once only, so no activation checkpoint was at work. "
        f"{NOTHING_TO_CHANGE}"
    ),
    "partial": (
        "Some blocks, or some of their operators, ran again once in the backward pass. That is "
        "how selective checkpointing trades time for memory. Nothing ran more often than that, "
        "so nothing is wasted."
    ),
    "full": (
        "Every checkpointed block ran again exactly once in the backward pass. That is the "
        "price of ordinary activation checkpointing, paid once. Nothing is wasted."
    ),
    "doubled": (
        "Activation checkpointing needs one recompute of a block in the backward pass. Here the "
        "same work ran again more often than that, and the recomputes after the first take time."
    ),
    "inconclusive": (
        "The trace does not show whether forward work ran again in the backward pass, so this "
        "page cannot say whether the job is doubled."
    ),
}
BY_DESIGN_MEANING = (
    "One autograd function runs another one's forward again in its own gradient, so that its "
    "results need not be kept. That is how the model is written, and no setting turned it on. "
    f"{NOTHING_TO_CHANGE}"
)
# What attention's kernels alone say, where none ran again.
NO_ATTENTION_MEANING = (
    "No kernel that could be counted ran again in the backward pass. Of everything else, kernels "
    "say nothing: a checkpoint that keeps attention's results looks the same."
)
# What the compiler's graphs alone say, where nothing in them is doubled.
GRAPHS_MEANING = (
    "The compiler's graphs say so of compiled code. How often each of them runs, and what runs "
    "outside of them, they do not tell."
)
SURROUNDINGS = (
    "Nor do these logs tell whether checkpoints are around compiled code, which would run all of "
    "it once more. A recording by recompute-scan run does."
)
EVIDENCE_WORDS: dict[EvidenceLevel, str] = {
    "annotated": "the trace has an annotation for every checkpointed call",
    "autograd": "operators and autograd nodes in the trace were matched, without annotations",
    "kernels": "kernels were counted by their names; operators do not show the model",
    "graphs": "compiled code was counted from the compiler's own graphs alone",
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
# As they are commonly called, where the result has another word.
_FAMILY_WORDS = {"gemm": "matmul"}
_SAFE = "safe; the results of training cannot change"
_REVIEW = "look before you apply it"
KIND_WORDS = {"raised": "failed", "exited": "failed", "hung": "hung", "killed": "killed"}
STATUS_WORDS = {
    "found": "found",
    "clean": "clean",
    "not-applicable": "does not apply",
    "error": "could not be checked",
}


def one_line(source: str | None) -> str:
    """A statement of source code on one line, for places that have only one."""
    joined = " ".join((source or "").split())
    return re.sub(r"([(\[{]) | ?,? (?=[)\]}])", r"\1", joined)


def family_words(family: str) -> str:
    """A family of operators, as it is commonly called."""
    return _FAMILY_WORDS.get(family, family)


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
    """What the step was measured on, for use after "on", and what limits it where that is not it.

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
    """``13 per step, 52.0 MiB, 4.10 ms, 1.20 ms with no computation beside them``."""
    if cost.repeated_collectives_ms is None or cost.repeated_collectives_count == 0:
        return UNKNOWN if cost.repeated_collectives_ms is None else "none"
    said = [ms(cost.repeated_collectives_ms)]
    if cost.repeated_collectives_bytes is not None:
        said.insert(0, size(cost.repeated_collectives_bytes))
    if cost.repeated_collectives_count is not None:
        said.insert(0, f"{count(cost.repeated_collectives_count)} per step")
    if cost.repeated_collectives_exposed_ms is not None:
        said.append(f"{ms(cost.repeated_collectives_exposed_ms)} with no computation beside them")
    return ", ".join(said)


def plain_count_row(result: Result) -> tuple[str, str] | None:
    """Does the plain count agree, and the numbers of its most telling operator."""
    check = result.cross_check
    if check is None:
        return None
    shown = _shown(check)
    if shown is None:
        return _AGREES[check.agrees], "no operator that only a forward pass has"
    name = shown.name.removeprefix("aten::")
    # A checkpoint of a single operator stops as soon as that has its inputs again.
    began = check.agrees and result.verdict == "none" and shown.inside > shown.in_hooks
    return (
        _AGREES[check.agrees],
        f"{plural(shown.inside, 'call')} of {name} inside the backward pass"
        f"{', none of which was run to its end,' if began else ''} and "
        f"{count(shown.outside)} outside, in the whole trace",
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


def _shown(check: CrossCheck) -> PlainCount | None:
    """The first operator that differs, else the first."""
    first = next(iter(check.counts), None)
    if check.agrees is False:
        return next((row for row in check.counts if row.inside != row.matched), first)
    return first
