"""What is said in several places: what was measured, three numbers, the step after the fix, ranks.

Reads the result, decides nothing: the verdict and the headline come from it as they are.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from recompute_scan.intervals import too_wide
from recompute_scan.report import words
from recompute_scan.report.section import of_memory_alone
from recompute_scan.result import MEASURED, Breakdown, Result
from recompute_scan.units import UNKNOWN, about, ms, pct, plural, rounded, share, span, times

_TYPICAL = "typical: 1.00 without checkpointing, 1.33 with each layer recomputed once, 1.67 twice"


class KeyNumber(Struct, frozen=True):
    """One of the three numbers under the verdict; ``alarming`` only where it shows waste."""

    label: str
    value: str
    note: str
    alarming: bool = False


class Waste(Struct, frozen=True):
    """What the fix saves per step: less time of today's step, more throughput than today's.

    A step of 100 instead of 134.5 takes 25.7 % less time and gives 34.5 % more throughput.
    """

    saved_ms: float
    less_time_pct: float
    more_throughput_pct: float


class StepAfter(Struct, frozen=True):
    """A step now and after the fix, in ms, with the range it may lie in: measured or predicted."""

    now_ms: float
    after_ms: float
    low_ms: float
    high_ms: float
    measured: bool


def shortest_answer(result: Result) -> str:
    """The answer in one word: the verdict, that it is a plan or of memory, how the run failed."""
    if result.plan is not None and result.crash is None:
        return "plan"
    if of_memory_alone(result):
        return "memory"
    return words.KIND_WORDS[result.crash.kind] if result.crash else result.verdict


def step_after(result: Result) -> StepAfter | None:
    """The step after the fix: as measured where that could tell, else as predicted."""
    verified, cost = result.verified, result.cost
    if verified is not None and verified.outcome in MEASURED:
        before, after = verified.before_step_ms, verified.after
        if before and after and after.step_ms and after.step_low_ms and after.step_high_ms:
            low, high = after.step_low_ms, after.step_high_ms
            return StepAfter(before, after.step_ms, low, high, measured=True)
    if cost is None:
        return None
    return StepAfter(
        cost.step_ms,
        cost.predicted_step_ms,
        cost.predicted_low_ms,
        cost.predicted_high_ms,
        measured=False,
    )


def predicted_beside(result: Result) -> StepAfter | None:
    """What was predicted, for comparison with what was measured.

    A prediction is a share of the step. The step that is measured later, unchanged, is seldom to
    the digit the one that it was made from, and may be of a slower hour: it is applied to that,
    unless the measurement says nothing.
    """
    verified, cost = result.verified, result.cost
    if verified is None or cost is None or not verified.before_step_ms or cost.step_ms <= 0:
        return None
    before = verified.before_step_ms if verified.outcome in MEASURED else cost.step_ms
    scale = before / cost.step_ms
    return StepAfter(
        before,
        scale * cost.predicted_step_ms,
        scale * cost.predicted_low_ms,
        scale * cost.predicted_high_ms,
        measured=False,
    )


def saving(result: Result) -> Waste | None:
    """The price of what is redundant, where the verdict says so and the fix saves time."""
    step = step_after(result)
    if result.verdict != "doubled" or step is None or step.now_ms <= 0 or step.after_ms <= 0:
        return None
    saved = step.now_ms - step.after_ms
    if saved <= 0:
        return None
    return Waste(
        saved_ms=saved,
        less_time_pct=100 * saved / step.now_ms,
        more_throughput_pct=100 * saved / step.after_ms,
    )


def fix_sentence(result: Result) -> str | None:
    """What the fix does to a step, in the one pair of numbers that every rendering gives.

    ``None`` where nothing is saved. No percentage where the step times vary too much for one.
    """
    found, step = saving(result), step_after(result)
    if found is None or step is None:
        return None
    took = f"{ms(step.after_ms)} instead of {ms(step.now_ms)}"
    took += ", measured" if step.measured else ""
    said = f"With the fix a step takes {'' if step.measured else 'about '}{took}"
    if _varies(result):
        return f"{said}: {about(found.saved_ms / step.now_ms)} less time."
    return (
        f"{said}: {pct(found.less_time_pct)} less time, "
        f"{pct(found.more_throughput_pct)} more throughput."
    )


def _varies(result: Result) -> bool:
    """Whether the saving that is told, measured or predicted, carries no digits."""
    cost, verified = result.cost, result.verified
    if verified is not None and verified.outcome in MEASURED:
        return verified.saving_is_rough
    if cost is None or cost.step_low_ms is None or cost.step_high_ms is None:
        return False
    return too_wide(cost.step_ms, cost.step_low_ms, cost.step_high_ms)


def what_was_measured(result: Result) -> tuple[str, ...]:
    """Script or trace, device, ranks, torch and date, as far as they are known."""
    facts = result.environment
    device = facts.get("device_name") or facts.get("gpu")
    if device is None and facts.get("device") == "cpu":
        device = "CPU"
    known = facts.get("world_size", "")
    ranks = int(known) if known.isascii() and known.isdigit() and len(known) < 8 else 0
    ranks = max(ranks, len(result.ranks))
    return tuple(
        part
        for part in (
            facts.get("target") or next((rank.trace for rank in result.ranks), None),
            device,
            plural(ranks, "rank") if ranks else None,
            f"torch {facts['torch']}" if "torch" in facts else None,
            facts.get("recorded"),
        )
        if part
    )


def total(breakdown: Breakdown) -> float:
    """The whole of a breakdown, in ms."""
    return (
        breakdown.forward
        + breakdown.recompute
        + breakdown.redundant
        + breakdown.backward
        + breakdown.optimizer
        + breakdown.other
    )


def key_numbers(result: Result) -> tuple[KeyNumber, KeyNumber, KeyNumber]:
    """Recomputes per layer, share of the step, step time after: in that order."""
    return (_recomputes(result), _share(result), _step_after(result))


def _recomputes(result: Result) -> KeyNumber:
    note = words.first_true(result, words.RECOMPUTES_NOTE)
    value = times(result.recompute_per_backward)
    return KeyNumber("Recomputes per layer", value, note, result.verdict == "doubled")


def _share(result: Result) -> KeyNumber:
    parts = result.cost.breakdown if result.cost else None
    whole = total(parts) if parts else 0.0
    verified = result.verified
    if verified is not None and verified.outcome == "helps":
        note = "saved by the fix (measured)"
        if verified.saving_is_rough:
            note = "saved by the fix (measured roughly)"
        part = rounded(verified.saving_pct, verified.saving_is_rough)
        return KeyNumber("Share of the step", part, note, True)
    found = saving(result)
    if found is not None:
        note = "would be saved by the fix (predicted)"
        part = rounded(found.less_time_pct, _varies(result))
        return KeyNumber("Share of the step", part, note, True)
    if result.verdict == "doubled":
        value = parts.redundant / whole if parts and whole > 0 else None
        if value is None:
            return KeyNumber("Share of the step", UNKNOWN, _not_known(result), True)
        return KeyNumber("Share of the step", share(value), "spent on redundant recomputes", True)
    value = (parts.recompute + parts.redundant) / whole if parts and whole > 0 else None
    if value is None or result.verdict == "inconclusive":
        return KeyNumber("Share of the step", UNKNOWN, _not_known(result))
    note = words.first_true(result, words.SHARE_NOTE)
    return KeyNumber("Share of the step", share(value), note)


def _not_known(result: Result) -> str:
    return words.first_true(result, words.UNKNOWN_NOTE)


def _step_after(result: Result) -> KeyNumber:
    label = "Step time" if result.verdict in ("none", "partial", "full") else "Step time after"
    step = step_after(result)
    if step is None:
        note = "the trace gave no step time"
        if result.compiled is not None and result.verdict != "inconclusive":
            note = "the compiler's graphs have no times; --verify measures a fix"
        return KeyNumber(label, UNKNOWN, note)
    if step.measured:
        return KeyNumber(label, ms(step.after_ms), _measured_note(result, step))
    if saving(result) is not None:
        note = f"{ms(step.now_ms)} now; likely {span(step.low_ms, step.high_ms)} after the fix"
        return KeyNumber(label, ms(step.after_ms), note)
    if result.verdict == "inconclusive":
        return KeyNumber(label, UNKNOWN, f"{ms(step.now_ms)} now")
    return KeyNumber(label, ms(step.now_ms), words.first_true(result, words.STEP_NOTE))


def _measured_note(result: Result, step: StepAfter) -> str:
    note = f"measured with the fix applied; {ms(step.now_ms)} now"
    predicted = predicted_beside(result)
    return f"{note}; {ms(predicted.after_ms)} was predicted" if predicted else note


def attention_sentence(result: Result) -> str | None:
    """How often attention ran; its gradient only where that is an operator of attention's own."""
    calls = result.attention
    if calls is None or result.verdict == "inconclusive":
        return None
    said = f"Attention ran {plural(calls.forward_per_step, 'time')} per step in the forward pass"
    if calls.recomputed_per_step:
        said += f" and {plural(calls.recomputed_per_step, 'time')} again in the backward pass"
    if calls.backward_per_step:
        said += f"; its gradient ran {plural(calls.backward_per_step, 'time')}"
    return f"{said}."


def ratio_row(result: Result) -> tuple[str, str] | None:
    """HFU over MFU as a number and what to hold beside it; ``None`` where it is not known."""
    flops = result.flops
    if flops is None or flops.hfu_over_mfu is None:
        return None
    reached = ""
    if flops.hfu is not None and flops.mfu is not None:
        reached = f"HFU {share(flops.hfu)}, MFU {share(flops.mfu)} of the peak; "
    return times(flops.hfu_over_mfu), reached + _TYPICAL


def rank_words(result: Result) -> str:
    """``3 doubled, 1 full``: the ranks' own verdicts, the commonest first."""
    counts = Counter(rank.verdict for rank in result.ranks)
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def ranks_sentence(result: Result) -> str | None:
    """How many ranks there are, whether they agree, and whose numbers the page shows.

    ``None`` for a single rank. The result is that of the first rank with the worst verdict.
    """
    if len(result.ranks) < 2:
        return None
    number = plural(len(result.ranks), "rank")
    shown = next((r.rank for r in result.ranks if r.verdict == result.verdict), None)
    whose = "" if shown is None else f" The numbers of this page are those of rank {shown}"
    if len({rank.verdict for rank in result.ranks}) == 1:
        said = f"{number}, all {result.ranks[0].verdict}."
        return said + (f"{whose}." if whose else "")
    said = f"{number} that differ: {rank_words(result)}."
    return said + (f"{whose}, the first with the worst verdict." if whose else "")
