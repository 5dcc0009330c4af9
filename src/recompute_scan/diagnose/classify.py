"""From failures to diagnoses: which known cause, how sure, and which lines show it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from recompute_scan.crash import ModelState, Raised
from recompute_scan.diagnose.causes import SIGNATURES
from recompute_scan.diagnose.hangs import (
    BUS,
    BY_EXCEPTION,
    COMPARED,
    CRASHED,
    KILLED,
    NAMED,
    RECOMPUTED_MESSAGE,
    SAVE_HANG,
)
from recompute_scan.diagnose.log_lines import Ended
from recompute_scan.diagnose.logs import Log
from recompute_scan.diagnose.places import doing, phase, user_place
from recompute_scan.diagnose.tracebacks import Failure
from recompute_scan.diagnose.waiting import is_saving, of_timeouts
from recompute_scan.frameworks.signature import Beside, Match, Signature
from recompute_scan.result import Level

# What a rank says when another has died, or a launcher when one of its processes has.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|Process(?:Exited|Raised)Exception|KeyboardInterrupt"
    r"|CalledProcessError|RayTaskError|RayActorError|ActorDiedError|Trials did not complete"
    r"|DistNetworkError|Connection (?:closed|reset) by peer|Connection reset|Broken pipe"
    r"|communicator was aborted|Watchdog caught collective|NCCL Error 6|ncclRemoteError"
    r"|remote process exited|Timed out (?:after )?waiting|Application timeout"
    r"|reached monitoredBarrier, but|^(?:Base)?ExceptionGroup\b"
)
_SIGNALS = {"SIGKILL": KILLED, "SIGBUS": BUS}
_SIGNALS |= dict.fromkeys(("SIGSEGV", "SIGILL", "SIGFPE"), CRASHED)
_LONGEST_SUMMARY = 240
_MOST_SHOWN = 8
# Lines between two exceptions of a process that show it to have outlived the first.
_OUTLIVED = 30
_IN_RECOMPUTE = doing("recompute")


class Diagnosis(Struct, frozen=True):
    """One known cause, recognised.

    Attributes:
        signature: What is known about it.
        confidence: ``high`` where it was reproduced and its place fits, ``low`` where only a
            line of text speaks for it.
        evidence: What shows it, one line each, with the numbers of a log's lines.
        rank: Whose failure it is.
        hint: Whether it is only worth knowing, and not what ended the run.
    """

    signature: Signature
    confidence: Level
    evidence: tuple[str, ...]
    rank: int | None = None
    hint: bool = False


class Findings(Struct, frozen=True):
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
    hints = tuple(_hints(log))
    ordered = sorted(_last(log.failures), key=lambda failure: _order(failure, log.first_rank))
    own = [failure for failure in ordered if not is_consequence(failure.errors)]
    first = next(iter(own or ordered), None)
    found = diagnose(own[0], log.lines) if own else _of_consequences(log, ordered)
    if found is not None:
        hints = tuple(hint for hint in hints if hint.signature.code != found.signature.code)
    return Findings(first, found, hints)


def _last(failures: Sequence[Failure]) -> list[Failure]:
    """The failures that ended each process: those that it outlived are left out.

    Where a process goes on for a while after an exception, somebody caught it. Close together,
    they may be several processes that write into one log, or one failure that led to another.
    """
    kept: dict[str, list[Failure]] = {}
    for failure in failures:
        before = kept.setdefault(failure.process, [])
        consequence = is_consequence(failure.errors)
        if before and not consequence and failure.began - before[-1].line > _OUTLIVED:
            before.clear()
        before.append(failure)
    return [failure for some in kept.values() for failure in some]


def _of_consequences(log: Log, failures: Sequence[Failure]) -> Diagnosis | None:
    """What is known where no rank raised anything of its own."""
    if log.dumped:
        mismatches = [one for one in log.dumped if one.mismatch]
        signature = COMPARED if mismatches else NAMED
        shown = (f"line {one.line}: {one.text}" for one in (mismatches or log.dumped)[:_MOST_SHOWN])
        return Diagnosis(signature, "medium", (*shown, how_checked(signature)))
    ended = log.ended if log.ended is not None and log.ended.signal in _SIGNALS else None
    # The launcher's first failure explains why others waited, where that rank did not wait itself.
    gone = log.first_rank is not None and log.first_rank not in {one.rank for one in log.timeouts}
    if log.timeouts and not (ended is not None and gone):
        return _of_timeouts(log, failures)
    if ended is not None:
        return _of_signal(ended)
    alike = len(failures) > 1 and all(_recomputes(failure) for failure in failures)
    for failure in failures:
        found = diagnose(failure, log.lines, alike=alike)
        if found is not None:
            return found
    return None


def _recomputes(failure: Failure) -> bool:
    return any(one.frames and _IN_RECOMPUTE(one.frames) is not None for one in failure.errors)


def _of_timeouts(log: Log, failures: Sequence[Failure]) -> Diagnosis:
    signature, evidence = of_timeouts(log.timeouts)
    ranks = {one.rank for one in log.timeouts}
    for failure in failures:
        for n, raised in enumerate(failure.errors):
            if is_saving(raised.frames) and len(ranks) > 1 and failure.rank in ranks:
                shown = _frame_line(failure, n, raised, _index(raised))
                lines = (*evidence, f"rank {failure.rank}, {shown}", how_checked(SAVE_HANG))
                others = [one for one in failures if one.rank not in (failure.rank, None)]
                if not any(is_saving(e.frames) for one in others for e in one.errors):
                    return Diagnosis(SAVE_HANG, "medium", lines, failure.rank)
    return Diagnosis(signature, "medium", (*evidence, how_checked(signature)))


def _index(raised: Raised) -> int:
    found = doing("saving")(raised.frames)
    assert found is not None
    return found


def _of_signal(ended: Ended) -> Diagnosis:
    signature = _SIGNALS[ended.signal]
    shown = (f"line {ended.line}: {ended.text}", f"that is {ended.signal}")
    return Diagnosis(signature, "medium", (*shown, how_checked(signature)))


def diagnose(
    failure: Failure,
    beside: Sequence[Beside] = (),
    models: Sequence[ModelState] = (),
    *,
    alike: bool = False,
) -> Diagnosis | None:
    """The known cause of one failure, or ``None``.

    Args:
        failure: The exceptions, the first raised first.
        beside: Other lines that may matter, such as warnings.
        models: The models alive then, where the run could look at them.
        alike: Whether every rank was recomputing, so that each had its partner.
    """
    for n, raised in enumerate(failure.errors):
        began = _began(failure, n)
        for signature in (*SIGNATURES, *_of_hangs(raised, alike=alike)):
            match = signature.match(raised, beside, began, failure.rank)
            if match is not None:
                return Diagnosis(
                    signature,
                    _confidence(signature, raised, models),
                    tuple(_evidence(failure, n, signature, match, models)),
                    failure.rank,
                )
    return None


def _of_hangs(raised: Raised, *, alike: bool) -> tuple[Signature, ...]:
    recomputed = raised.frames and not alike and _IN_RECOMPUTE(raised.frames) is not None
    return (RECOMPUTED_MESSAGE, *BY_EXCEPTION) if recomputed else BY_EXCEPTION


def _began(failure: Failure, n: int) -> int:
    places = failure.places[n] if failure.places else ()
    if places:
        return places[0]
    return failure.lines[n] if failure.lines else 0


def _order(failure: Failure, first_rank: int | None) -> tuple[bool, int]:
    other = first_rank is not None and failure.rank is not None and failure.rank != first_rank
    return (other, failure.line)


def is_consequence(errors: Sequence[Raised]) -> bool:
    """Is this what a rank, or the launcher, says when another rank has failed?"""
    return all(_CONSEQUENCE.search(raised.summary) for raised in errors)


def _hints(log: Log) -> list[Diagnosis]:
    found: dict[tuple[str, str], Diagnosis] = {}
    for line in log.lines:
        for signature in SIGNATURES:
            if signature.notice and signature.message.search(line.text):
                key = (signature.code, signature.cause_name)
                evidence = (f"line {line.number}: {line.text[:300]}", how_checked(signature))
                sure: Level = "low" if signature.unsure else "medium"
                found.setdefault(key, Diagnosis(signature, sure, evidence, hint=True))
    return list(found.values())


def _confidence(signature: Signature, raised: Raised, models: Sequence[ModelState]) -> Level:
    if signature.unsure or (not raised.frames and signature.where is not None):
        return "low"
    parallel = any(model.parallel for model in models)
    if signature.sharded is not None and not parallel and signature.sharded(raised.frames) is None:
        return "low"
    if not raised.frames:
        return "medium"
    return "high" if signature.checked == "reproduced" else "medium"


def _evidence(
    failure: Failure, n: int, signature: Signature, match: Match, models: Sequence[ModelState]
) -> list[str]:
    raised = failure.errors[n]
    parts = [f"line {failure.lines[n]}"] if failure.lines else []
    parts += [f"rank {failure.rank}"] if failure.rank is not None else []
    whose = f"{', '.join(parts)}: " if parts else ""
    found = [whose + cut(raised.summary)]
    if match.frame is not None:
        found.append(_frame_line(failure, n, raised, match.frame))
    if match.beside is not None:
        line = f"line {match.beside.number}, before it: " if match.beside.number else ""
        found.append(line + cut(match.beside.text))
    place, doing_ = user_place(raised.frames), phase(raised.frames)
    if place:
        found.append(f"raised at {place}" + (f", {doing_}" if doing_ else ""))
    found += [_model(model) for model in models if model.checkpoints or model.parallel]
    found.append(f"Versions: {signature.versions}")
    found.append(how_checked(signature))
    return found


def _frame_line(failure: Failure, n: int, raised: Raised, index: int) -> str:
    frame = raised.frames[index]
    places = failure.places[n] if failure.places else ()
    line = f"line {places[index]}, " if index < len(places) else ""
    return f"{line}in the failing stack: {frame.place} in {frame.function}"


def how_checked(signature: Signature) -> str:
    """On what the diagnosis rests, in one sentence."""
    if signature.checked == "reproduced":
        return "A script of ours fails in the same way, on CPU."
    return "We could not make it happen here: this goes by what logs say."


def cut(text: str) -> str:
    """The beginning of a long message."""
    return text if len(text) <= _LONGEST_SUMMARY else text[:_LONGEST_SUMMARY] + "…"


def _model(model: ModelState) -> str:
    parts = [*model.parallel, *model.checkpoints]
    if model.use_cache is not None:
        parts.append(f"use_cache={model.use_cache}")
    return f"{model.name}: {', '.join(parts)}"
