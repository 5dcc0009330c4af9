"""Numbers and fixed terms as a person reads them; the same words in every rendering.

Unknown values read "not known", never 0.
"""

from __future__ import annotations

import math
import re

from recompute_scan.result import Checkpoint, EvidenceLevel, Result, Verdict

UNKNOWN = "not known"

VERDICT_WORDS: dict[Verdict, str] = {
    "none": "none (nothing recomputed)",
    "partial": "partial (some recomputed, once)",
    "full": "full (all recomputed, once)",
    "doubled": "doubled (recomputed more than once)",
    "inconclusive": "inconclusive",
}

VERDICT_MEANING: dict[Verdict, str] = {
    "none": (
        "No forward work ran again in the backward pass. Nothing is wasted, and there is "
        "nothing to change."
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
        "Activation checkpointing needs one replay of a block in the backward pass. Here the "
        "same work ran again more often than that. The replays after the first take time, and "
        "round the same block they free no further memory."
    ),
    "inconclusive": (
        "The trace cannot show whether forward work ran again in the backward pass, so this "
        "page neither accuses nor clears the job."
    ),
}

HOW_TO_RECORD = (
    "Record at least one whole training step, forward and backward pass, with operator events "
    "on. The command “recompute-scan run --steps 5 train.py” does so with your script unchanged. "
    "Where torch.compile hides the operators, set TORCH_COMPILE_DISABLE=1 for the recording. In "
    "torch.profiler code of your own, keep ProfilerActivity.CPU among the activities and let "
    "the schedule record at least two whole steps."
)

EVIDENCE_WORDS: dict[EvidenceLevel, str] = {
    "annotated": "the run marked every checkpointed call in the trace",
    "autograd": "operators and autograd nodes in the trace were matched; no marks were needed",
    "kernels": "only kernel names were counted; the trace holds no operators",
}

# What each mechanism is called in its own documentation; unknown ones are shown as they stand.
MECHANISM_WORDS = {
    "fsdp-wrapper": "FSDP's checkpoint wrapper (checkpoint_wrapper)",
    "hf-gradient-checkpointing": "Hugging Face's gradient_checkpointing_enable",
    "composable-checkpoint": "PyTorch's composable checkpoint",
    "checkpoint-sequential": "torch.utils.checkpoint.checkpoint_sequential",
    "torch-checkpoint": "a direct call of torch.utils.checkpoint.checkpoint",
}

PART_WORDS = {
    "forward": "Forward pass",
    "recompute": "Needed replays",
    "surplus": "Surplus replays",
    "backward": "Backward pass",
    "optimizer": "Optimizer",
    "other": "Everything else",
}

DISPOSITION_WORDS = {
    "safe": "safe; the results of training cannot change",
    "review": "look before you apply it; it may touch more than the replays",
}

STATUS_WORDS = {
    "found": "found",
    "clean": "clean",
    "not-applicable": "does not apply",
    "error": "could not be checked",
}


def ms(value: float | None) -> str:
    """``512.3 ms``: three to four significant digits, grouped thousands."""
    if not _known(value):
        return UNKNOWN
    assert value is not None
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f} ms"
    if size >= 10 or value == 0:
        return f"{value:.1f} ms"
    return f"{value:.2f} ms" if size >= 0.1 else f"{value:.3f} ms"


def microseconds(value: float | None) -> str:
    """``1234567.8 µs``: a point on the trace's own clock, in the digits of the file's ``ts``."""
    return f"{value:.1f} µs" if value is not None and _known(value) else UNKNOWN


def pct(value: float | None) -> str:
    """``17.3 %`` from 17.3."""
    return f"{value:.1f} %" if value is not None and _known(value) else UNKNOWN


def share(value: float | None) -> str:
    """``17.3 %`` from 0.173."""
    return pct(None if value is None else 100 * value)


def times(value: float | None) -> str:
    """``2.0``, ``1.5``, ``1.97``: a count or mean with no more digits than it has."""
    if value is None or not _known(value):
        return UNKNOWN
    text = f"{value:,.2f}"
    return text[:-1] if text.endswith("0") else text


def count(value: float | None) -> str:
    """``32`` or ``32.5``: calls in one step."""
    if value is None or not _known(value):
        return UNKNOWN
    return f"{value:,.0f}" if float(value).is_integer() else times(value)


def plural(number: float, word: str) -> str:
    """``1 block``, ``8 blocks``, ``1.5 replays``."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def plain(value: object) -> str:
    """A value of a free-form table: yes or no, not known, a number or text as it stands."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def one_line(source: str | None) -> str:
    """A statement of source code on one line, for places that have only one."""
    joined = " ".join((source or "").split())
    return re.sub(r"([(\[{]) | ?,? (?=[)\]}])", r"\1", joined)


def mechanism_words(checkpoint: Checkpoint) -> str:
    """How a checkpoint was switched on, in words; unknown mechanisms as they are named."""
    if checkpoint.mechanism is None:
        return "mechanism not known"
    return MECHANISM_WORDS.get(checkpoint.mechanism, checkpoint.mechanism)


def variant_words(checkpoint: Checkpoint) -> str:
    """``reentrant``, ``non-reentrant`` or that it is not known."""
    return checkpoint.variant or "variant not known"


def place_words(depth: int, total: int) -> str:
    """``outer``, ``inner`` or ``only``, for a checkpoint among ``total`` round one block."""
    if total <= 1:
        return "only"
    if depth == 0:
        return "outer"
    return "inner" if depth == total - 1 else "middle"


def device_words(result: Result) -> str:
    """The device that limits the step, for use after "on"."""
    if result.cost is None:
        return UNKNOWN
    return "the GPU" if result.cost.device == "gpu" else "the CPU"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
