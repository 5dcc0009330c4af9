"""From failures to diagnoses: which known cause, how sure, and what shows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from recompute_scan.crash import ModelState, Raised
from recompute_scan.diagnose.logs import Failure, Log
from recompute_scan.diagnose.places import phase, user_place
from recompute_scan.diagnose.registry import SIGNATURES
from recompute_scan.diagnose.signature import Signature
from recompute_scan.diagnose.waiting import of_timeouts
from recompute_scan.result import Level

# What a rank says when another has died, or a launcher when one of its processes has.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|ProcessExitedException|KeyboardInterrupt"
    r"|DistNetworkError|Connection (?:closed|reset) by peer|Connection reset|Broken pipe"
    r"|communicator was aborted|Watchdog caught collective|NCCL Error 6|ncclRemoteError"
    r"|remote process exited|Timed out (?:after )?waiting|Application timeout"
)


_LONGEST_SUMMARY = 240


@dataclass(frozen=True)
class Diagnosis:
    """One known cause, recognised.

    Attributes:
        signature: What is known about it.
        confidence: ``high`` where it was reproduced and its place fits, ``low`` where only a
            line of text speaks for it.
        evidence: What shows it, one line each.
        rank: Whose failure it is.
        hint: Whether it is only worth knowing, and not what ended the run.
    """

    signature: Signature
    confidence: Level
    evidence: tuple[str, ...]
    rank: int | None = None
    hint: bool = False


@dataclass(frozen=True)
class Findings:
    """The answer for a log or a crash.

    Attributes:
        first: The failure that came first, known or not; ``None`` where there is none.
        cause: What it is, where it is known.
        hints: Other known things that the log shows, and that did not end the run.
    """

    first: Failure | None
    cause: Diagnosis | None
    hints: tuple[Diagnosis, ...] = ()


def diagnose_log(log: Log) -> Findings:
    """What ended the run that wrote this log, and what else it shows."""
    lines = tuple(line for _, line in log.lines)
    hints = tuple(_hints(log))
    ordered = sorted(log.failures, key=lambda failure: _order(failure, log.first_rank))
    for failure in ordered:
        found = diagnose(failure, lines)
        if found is not None:
            hints = tuple(hint for hint in hints if hint.signature.code != found.signature.code)
            return Findings(failure, found, hints)
        if not is_consequence(failure.errors):
            return Findings(failure, None, hints)
    first = ordered[0] if ordered else None
    if log.timeouts:
        signature, evidence = of_timeouts(log.timeouts, log.saving)
        return Findings(first, Diagnosis(signature, "medium", evidence), hints)
    return Findings(first, None, hints)


def diagnose(
    failure: Failure, beside: Sequence[str] = (), models: Sequence[ModelState] = ()
) -> Diagnosis | None:
    """The known cause of one failure, or ``None``.

    Args:
        failure: The exceptions, the first raised first.
        beside: Other lines that may matter, such as warnings.
        models: The models alive then, where the run could look at them.
    """
    for raised in failure.errors:
        for signature in SIGNATURES:
            if signature.matches(raised, tuple(beside)):
                return Diagnosis(
                    signature,
                    _confidence(signature, raised),
                    tuple(_evidence(failure, raised, signature, models)),
                    failure.rank,
                )
    return None


def _order(failure: Failure, first_rank: int | None) -> tuple[bool, bool, int]:
    other = first_rank is not None and failure.rank is not None and failure.rank != first_rank
    return (is_consequence(failure.errors), other, failure.line)


def is_consequence(errors: Sequence[Raised]) -> bool:
    """Is this what a rank, or the launcher, says when another rank has failed?"""
    return all(_CONSEQUENCE.search(raised.summary) for raised in errors)


def _hints(log: Log) -> list[Diagnosis]:
    found: dict[tuple[str, str], Diagnosis] = {}
    for number, line in log.lines:
        for signature in SIGNATURES:
            if signature.notice and signature.message.search(line):
                key = (signature.code, signature.cause_name)
                evidence = (f"line {number}: {line[:300]}",)
                found.setdefault(key, Diagnosis(signature, "medium", evidence, hint=True))
    return list(found.values())


def _confidence(signature: Signature, raised: Raised) -> Level:
    if not raised.frames:
        return "low" if signature.frames is not None else "medium"
    return "high" if signature.checked == "reproduced" else "medium"


def _evidence(
    failure: Failure, raised: Raised, signature: Signature, models: Sequence[ModelState]
) -> list[str]:
    whose = f"rank {failure.rank}: " if failure.rank is not None else ""
    found = [whose + cut(raised.summary)]
    place, doing = user_place(raised.frames), phase(raised.frames)
    if place:
        found.append(f"raised under {place}" + (f", {doing}" if doing else ""))
    found += [_model(model) for model in models if model.checkpoints or model.parallel]
    found.append(f"Versions: {signature.versions}")
    found.append(how_checked(signature))
    return found


def how_checked(signature: Signature) -> str:
    """On what the diagnosis rests, in one sentence."""
    if signature.checked == "reproduced":
        return "A script of ours fails in the same way, on CPU."
    return "This goes by the message alone: we could not make it happen here."


def cut(text: str) -> str:
    """The beginning of a long message."""
    return text if len(text) <= _LONGEST_SUMMARY else text[:_LONGEST_SUMMARY] + "…"


def _model(model: ModelState) -> str:
    parts = [*model.parallel, *model.checkpoints]
    if model.use_cache is not None:
        parts.append(f"use_cache={model.use_cache}")
    return f"{model.name}: {', '.join(parts)}"
