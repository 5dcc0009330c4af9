"""What every rendering says first: three numbers, the waste, and the commands to check the fix.

Reads the result, decides nothing: the verdict and the headline come from it as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from recompute_scan.result import MEASURED, Breakdown, Finding, Result
from recompute_scan.units import UNKNOWN, ms, pct, share, times

_PLAIN_SCRIPT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@%+-]{0,300}\.py")

# The folder that the commands on the page record into.
AFTER = "recompute-scan-after"


@dataclass(frozen=True)
class KeyNumber:
    """One of the three numbers under the verdict; ``alarming`` only where it shows waste."""

    label: str
    value: str
    note: str
    alarming: bool = False


@dataclass(frozen=True)
class Waste:
    """What redundant recomputes cost per step, in two ways that must never be mixed.

    ``more_time_pct`` compares with the step after the fix, ``throughput_pct`` with today's:
    a step of 134.5 where 100 is enough takes 34.5 % more time and loses 25.7 % of throughput.
    """

    saved_ms: float
    more_time_pct: float
    throughput_pct: float


@dataclass(frozen=True)
class StepAfter:
    """A step now and after the fix, in ms, with the range it may lie in: measured or predicted."""

    now_ms: float
    after_ms: float
    low_ms: float
    high_ms: float
    measured: bool


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
    """What was predicted, to stand beside what was measured.

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
        more_time_pct=100 * saved / step.after_ms,
        throughput_pct=100 * saved / step.now_ms,
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
    value = result.recompute_per_backward
    doubled = result.verdict == "doubled"
    if value is None:
        note = "the trace cannot tell"
    elif doubled:
        note = "ordinary checkpointing needs 1; every further one is redundant"
    elif value == 0:
        note = "no forward work ran again in the backward pass"
    else:
        note = "what ordinary checkpointing needs"
    return KeyNumber("Recomputes per layer", times(value), note, doubled)


def _share(result: Result) -> KeyNumber:
    parts = result.cost.breakdown if result.cost else None
    whole = total(parts) if parts else 0.0
    verified = result.verified
    if verified is not None and verified.outcome == "helps":
        note = "goes with the fix, measured"
        return KeyNumber("Share of the step", pct(verified.saving_pct), note, True)
    found = saving(result)
    if found is not None:
        note = "would go with the fix, as predicted"
        return KeyNumber("Share of the step", pct(found.throughput_pct), note, True)
    if result.verdict == "doubled":
        value = parts.redundant / whole if parts and whole > 0 else None
        return KeyNumber("Share of the step", share(value), "spent on redundant recomputes", True)
    value = (parts.recompute + parts.redundant) / whole if parts and whole > 0 else None
    if value is None or result.verdict == "inconclusive":
        return KeyNumber("Share of the step", UNKNOWN, "the trace cannot tell")
    note = "spent on recomputes that save memory" if value else "spent on recomputes"
    return KeyNumber("Share of the step", share(value), note)


def _step_after(result: Result) -> KeyNumber:
    label = "Step time" if result.verdict in ("none", "partial", "full") else "Step time after"
    step = step_after(result)
    if step is None:
        return KeyNumber(label, UNKNOWN, "the trace gave no step time")
    if step.measured:
        return KeyNumber(label, ms(step.after_ms), _measured_note(result, step))
    if saving(result) is not None:
        note = (
            f"{ms(step.now_ms)} now; likely {ms(step.low_ms)} to {ms(step.high_ms)} after the fix"
        )
        return KeyNumber(label, ms(step.after_ms), note)
    note = "stays as it is: there is no redundant to remove"
    if result.verdict == "doubled":
        note = "the same as now: no saving is predicted"
    elif result.verdict == "inconclusive":
        return KeyNumber(label, UNKNOWN, f"{ms(step.now_ms)} now")
    return KeyNumber(label, ms(step.now_ms), note)


def _measured_note(result: Result, step: StepAfter) -> str:
    note = f"measured with the fix applied; {ms(step.now_ms)} now"
    predicted = predicted_beside(result)
    return f"{note}; {ms(predicted.after_ms)} was predicted" if predicted else note


def further_reason(result: Result) -> str | None:
    """Why there is no clearer answer, where the headline does not say it already."""
    reason = result.reason
    if reason is None or reason.rstrip(".").casefold() in result.headline.casefold():
        return None
    return reason


def waste_sentences(result: Result) -> list[str]:
    """What is redundant and its predicted cost, in whole sentences: time first, throughput apart.

    None where the fix was measured: :mod:`recompute_scan.report.measured` has better ones.
    """
    found, step = saving(result), step_after(result)
    if found is None or step is None or step.measured:
        return []
    return [
        f"A step takes {pct(found.more_time_pct)} more time than needed "
        f"({ms(found.saved_ms)} of it would go with the fix).",
        f"Put as throughput, {pct(found.throughput_pct)} of it is lost.",
    ]


def health_counters(result: Result) -> list[tuple[str, int]]:
    """What was repaired, dropped or missing, in words; the plain number of events is neither."""
    return [
        (name.replace("_", " "), number)
        for name, number in result.health.items()
        if number and name != "events"
    ]


def finding_anchors(findings: Sequence[Finding]) -> list[str]:
    """One anchor a finding: its code, numbered from the second of the same code on."""
    seen: dict[str, int] = {}
    anchors = []
    for finding in findings:
        name = "finding-" + re.sub(r"[^A-Za-z0-9]+", "-", finding.code)[:40]
        seen[name] = seen.get(name, 0) + 1
        anchors.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return anchors


def check_commands(result: Result) -> list[tuple[str, str]]:
    """How to see for oneself that the fix works: what each step does, and the exact command."""
    steps = []
    diff = next((item.fix.diff for item in result.findings if item.fix and item.fix.diff), None)
    if diff is not None:
        # patch takes an absolute path only as one below the folder it is told to start from
        patch = "patch -d / -p1" if diff.startswith("--- /") else "patch -p1"
        steps.append(("Save the diff as fix.diff and apply it.", f"{patch} < fix.diff"))
    again = run_again(result) or f"recompute-scan run --steps 5 -o {AFTER} train.py"
    what = "whole steps" if result.verdict == "inconclusive" else "the same steps again"
    steps.append((f"Record {what}, into a folder of their own.", again))
    steps.append(("Read the new verdict.", f"recompute-scan analyze {AFTER}"))
    return steps


def run_again(result: Result) -> str | None:
    """The command that records the same script again, without the script's own arguments.

    The script's name came with the result, and people paste what a report tells them to run:
    a name that a shell would read more into gives ``None``.
    """
    target = result.environment.get("target", "")
    if not _PLAIN_SCRIPT.fullmatch(target):
        return None
    return f"recompute-scan run --steps 5 -o {AFTER} {target}"
