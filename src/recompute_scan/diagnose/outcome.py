"""From logs and the ends of ranks to a diagnosis: the known cause, its confidence, its evidence.

Lines of several ranks in a log may be mixed where each names its rank, as with torchrun
(``[rank1]:``, ``[default1]:``), srun (``1: ``) and Ray (``(Worker pid=7)``). Colors are taken off.
Memory does not grow with the log: each different failure is kept once, up to a limit.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from msgspec import Struct

from recompute_scan.crash import Crash, ModelState, Raised, RankEnd
from recompute_scan.diagnose import checkpoint_errors, device_errors, hangs, recompute_errors
from recompute_scan.diagnose.log_lines import (
    RECOMPILATION,
    Ended,
    Launcher,
    is_telling,
    is_warning,
    owner,
    printed,
)
from recompute_scan.diagnose.tracebacks import Failure, LogStream, doing, phase, user_place
from recompute_scan.frameworks import registry
from recompute_scan.frameworks.detect import LogLine, Match, Signature, described
from recompute_scan.result import Finding, Fix, Level
from recompute_scan.units import first_few, plural


def _with_frameworks(general: tuple[Signature, ...]) -> tuple[Signature, ...]:
    """Each framework's own causes before the last one of their code, which is the general one."""
    found = list(general)
    for one in registry.signatures():
        places = [place for place, other in enumerate(found) if other.code == one.code]
        found.insert(places[-1] if places else len(found), one)
    return tuple(found)


# Those that look at more come first: within a message the particular causes before the general
# one, and "out of memory while saving" before "out of memory".
SIGNATURES = _with_frameworks(
    (
        *recompute_errors.SIGNATURES,
        *checkpoint_errors.SIGNATURES,
        *checkpoint_errors.CHECKPOINTING_SIGNATURES,
        *recompute_errors.SAVING_SIGNATURES,
        *device_errors.SIGNATURES,
    )
)
# Seen in a run alone: what its weights show, without any failure.
IN_RUNS: tuple[Signature, ...] = (checkpoint_errors.SILENT,)
# Recognised by what ranks do and not by what one exception says.
HANGS: tuple[Signature, ...] = hangs.ALL


LONGEST_LINE = 1 << 16
MOST_FAILURES = 100
_MOST_STREAMS = 4096
_RECOMPILATIONS = 64
_LONGEST_NOTE = 2000
# Bytes that are looked through at once.
_BATCH = 1500

# A title or a link of a terminal ends with BEL or with ESC and a backslash.
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,200}[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


class Log(Struct, frozen=True):
    """The failures and other lines of a log that matter, in the log's order.

    Attributes:
        failures: Exceptions, each different one once.
        lines: Other lines that matter, such as warnings.
        timeouts: Collectives that NCCL's watchdog gave up.
        dumped: What torch's own comparison of the ranks says.
        unnamed: Stacks that end without the name of an exception.
        first_rank: The rank that torchrun saw fail first.
        ended: The process that a launcher saw end first, where a signal ended it.
        read: Number of lines.
    """

    failures: tuple[Failure, ...]
    lines: tuple[LogLine, ...] = ()
    timeouts: tuple[hangs.Timeout, ...] = ()
    dumped: tuple[hangs.Dumped, ...] = ()
    unnamed: tuple[LogLine, ...] = ()
    first_rank: int | None = None
    ended: Ended | None = None
    read: int = 0


def read_log(lines: Iterable[bytes]) -> Log:
    """The failures and other lines that matter in a log."""
    reader = _LogReader()
    some: list[bytes] = []
    size = 0
    for line in lines:
        some.append(line)
        size += len(line)
        if size >= _BATCH:
            reader.read_some(some)
            some, size = [], 0
    reader.read_some(some)
    return reader.finish()


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a binary file; one longer than the limit comes in pieces."""
    while line := file.readline(LONGEST_LINE):
        yield line


class _LogReader:
    def __init__(self) -> None:
        self._streams: dict[str, LogStream] = {}
        self._busy = 0
        self._listens = False
        self._failures: dict[object, Failure] = {}
        self._lines: dict[str, LogLine] = {}
        # There may be any number of them, and what counts stands shortly before a failure.
        self._recompilations: deque[LogLine] = deque(maxlen=_RECOMPILATIONS)
        self._collectives = hangs.CollectiveReports()
        self._launcher = Launcher()
        self._number = 0

    def read_some(self, lines: list[bytes]) -> None:
        """Take in these lines; most of a log does not matter, and is passed over together."""
        if not self._listens and not is_telling(b"".join(lines)):
            self._number += len(lines)
            return
        for line in lines:
            self._number += 1
            if self._listens or is_telling(line):
                for text in printed(line.decode("utf-8", errors="replace").rstrip("\r\n")):
                    self._take(self._number, text)

    def _take(self, number: int, text: str) -> None:
        if "\x1b" in text:
            text = _COLOUR.sub("", text)
        key, rank, stamped, bare = owner(text)
        self._collectives.read(number, text, rank)
        self._launcher.read(number, bare)
        self._note(LogLine(number, text.strip()[:_LONGEST_NOTE], rank))
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= _MOST_STREAMS:
                return
            stream = self._streams[key] = LogStream(key, rank, self._keep)
        before = stream.busy
        stream.feed(number, bare, stamped=stamped)
        self._busy += stream.busy - before
        self._listens = bool(self._busy) or self._launcher.listens or self._collectives.listens

    def _note(self, line: LogLine) -> None:
        """Keep a line that may matter for a failure after it."""
        if is_warning(line.text) and len(self._lines) < MOST_FAILURES:
            self._lines.setdefault(line.text, line)
        elif RECOMPILATION.search(line.text):
            self._recompilations.append(line)

    def finish(self) -> Log:
        for stream in self._streams.values():
            stream.end()
        return Log(
            failures=tuple(sorted(self._failures.values(), key=lambda one: one.line)),
            lines=tuple(self._lines.values()),
            timeouts=self._collectives.timeouts,
            dumped=tuple(self._collectives.dumped),
            unnamed=tuple(one for stream in self._streams.values() for one in stream.unnamed),
            first_rank=self._launcher.first_rank,
            ended=self._launcher.ended,
            read=self._number,
        )

    def _keep(self, failure: Failure) -> None:
        last = failure.errors[-1]
        places = tuple((frame.file, frame.line) for frame in last.frames[-3:])
        key = (failure.rank, last.type, last.message[:2000], places)
        if len(self._failures) < MOST_FAILURES and key not in self._failures:
            self._failures[key] = failure
            for line in self._recompilations:
                self._lines[f"{line.number}: {line.text}"] = line


# Raised by a rank after another died, or by a launcher after one of its processes did.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|SignalException|Process(?:Exited|Raised)Exception|KeyboardInterrupt"
    r"|CalledProcessError|RayTaskError|RayActorError|ActorDiedError|Trials did not complete"
    r"|DistNetworkError|Connection (?:closed|reset) by peer|Connection reset|Broken pipe"
    r"|communicator was aborted|Watchdog caught collective|NCCL Error 6|ncclRemoteError"
    r"|remote process exited|Timed out (?:after )?waiting|Application timeout"
    r"|reached monitoredBarrier, but|^(?:Base)?ExceptionGroup\b"
)
_SIGNALS = {"SIGKILL": hangs.KILLED, "SIGBUS": hangs.BUS}
_SIGNALS |= dict.fromkeys(("SIGSEGV", "SIGILL", "SIGFPE"), hangs.CRASHED)
_LONGEST_SUMMARY = 240
_MOST_SHOWN = 8
# Lines between two exceptions of a process that show it to have outlived the first.
_OUTLIVED = 30
_IN_RECOMPUTE = doing("recompute")
_SAVES = doing("saving")


class Diagnosis(Struct, frozen=True):
    """One known cause, recognised.

    Attributes:
        signature: What is known about it.
        confidence: ``high`` where it was reproduced and its place fits, ``low`` where only a
            line of text speaks for it.
        evidence: What shows it, one line each, with the numbers of a log's lines.
        rank: The rank that failed.
        hint: Whether it is only worth knowing, and not what ended the run.
    """

    signature: Signature
    confidence: Level
    evidence: tuple[str, ...]
    rank: int | None = None
    hint: bool = False


class Findings(Struct, frozen=True):
    """The answer for a log or a crash: the failure that came first, known or not, its cause where
    that is known, and other known things that did not end the run.
    """

    first: Failure | None
    cause: Diagnosis | None
    hints: tuple[Diagnosis, ...] = ()


def diagnose_log(log: Log) -> Findings:
    """The failure that ended the run that wrote this log, and hints."""
    hints = tuple(_hints(log))
    early = {None, log.first_rank} if log.first_rank is not None else {e.rank for e in log.failures}
    ordered = sorted(_last(log.failures), key=lambda one: (one.rank not in early, one.line))
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
        if any(_repeats(failure, other) for other in failures):
            continue
        before = kept.setdefault(failure.process, [])
        consequence = is_consequence(failure.errors)
        if before and not consequence and failure.began() - before[-1].line > _OUTLIVED:
            before.clear()
        before.append(failure)
    return [failure for some in kept.values() for failure in some]


def _repeats(failure: Failure, other: Failure) -> bool:
    """Is it the other failure, named without its traceback, as in a title or a logger's line?"""
    raised, whole = failure.errors[-1], other.errors[-1]
    text = raised.message.partition("\n")[0].rstrip(" .…")
    return (
        bool(whole.frames)
        and not any(one.frames for one in failure.errors)
        and failure.process in ("", other.process)
        and raised.name == whole.name
        and (whole.message.startswith(text) if text else not whole.message)
    )


def _of_consequences(log: Log, failures: Sequence[Failure]) -> Diagnosis | None:
    """The known cause where every rank only raised a consequence."""
    if log.dumped:
        mismatches = [one for one in log.dumped if one.mismatch]
        signature = hangs.COMPARED if mismatches else hangs.NAMED
        shown = (f"line {one.line}: {one.text}" for one in (mismatches or log.dumped)[:_MOST_SHOWN])
        return Diagnosis(signature, "medium", tuple(shown))
    ended = log.ended if log.ended is not None and log.ended.signal in _SIGNALS else None
    # The launcher's first failure explains why others waited, where that rank did not wait itself.
    gone = log.first_rank is not None and log.first_rank not in {one.rank for one in log.timeouts}
    if log.timeouts and not (ended is not None and gone):
        return _of_timeouts(log, failures)
    if ended is not None:
        signature = _SIGNALS[ended.signal]
        shown_end = (f"line {ended.line}: {ended.text}", f"that is {ended.signal}")
        return Diagnosis(signature, "medium", shown_end)
    alike = len(failures) > 1 and all(
        any(_IN_RECOMPUTE(one.frames) is not None for one in failure.errors) for failure in failures
    )
    for failure in failures:
        found = diagnose(failure, log.lines, alike=alike)
        if found is not None:
            return found
    return None


def _of_timeouts(log: Log, failures: Sequence[Failure]) -> Diagnosis:
    signature, evidence = hangs.of_timeouts(log.timeouts)
    ranks = {one.rank for one in log.timeouts}
    for failure in failures:
        for n, raised in enumerate(failure.errors):
            saving = _SAVES(raised.frames)
            if saving is not None and len(ranks) > 1 and failure.rank in ranks:
                shown = _frame_line(failure, n, raised, saving)
                lines = (*evidence, f"rank {failure.rank}, {shown}")
                others = [one for one in failures if one.rank not in (failure.rank, None)]
                if all(_SAVES(e.frames) is None for one in others for e in one.errors):
                    return Diagnosis(hangs.SAVE_HANG, "medium", lines, failure.rank)
    places = [
        LogLine(one.began(), f"raised at {place}", one.rank)
        for one in failures
        if (place := user_place(one.errors[-1].frames)) is not None
    ]
    evidence += tuple(
        f"line {one.number}{'' if one.rank is None else f', rank {one.rank}'}: {one.text}"
        for one in (*places, *log.unnamed)[:_MOST_SHOWN]
    )
    # A rank that no line of the watchdog names may wait in a collective of another backend.
    silent = [one for one in failures if one.rank not in (None, *ranks)]
    if any(hangs.is_other(e.frames, log.timeouts) for one in silent for e in one.errors):
        return Diagnosis(hangs.DIVERGED, "low", evidence)
    return Diagnosis(signature, "medium", evidence)


def diagnose(
    failure: Failure,
    nearby: Sequence[LogLine] = (),
    models: Sequence[ModelState] = (),
    *,
    alike: bool = False,
) -> Diagnosis | None:
    """The known cause of one failure, or ``None``.

    ``nearby`` are other lines that may matter, such as warnings; ``models`` were alive then; with
    ``alike`` every rank was recomputing, so that each had its partner.
    """
    for n, raised in enumerate(failure.errors):
        recomputes = not alike and _IN_RECOMPUTE(raised.frames) is not None
        message = (hangs.RECOMPUTED_MESSAGE,) if recomputes else ()
        for signature in (*SIGNATURES, *message, *hangs.BY_EXCEPTION):
            match = signature.match(raised, nearby, failure.began(n), failure.rank)
            if match is not None:
                return Diagnosis(
                    signature,
                    _confidence(signature, raised, models),
                    tuple(_evidence(failure, n, signature, match, models)),
                    failure.rank,
                )
    return None


def is_consequence(errors: Sequence[Raised]) -> bool:
    """Is this what a rank, or the launcher, says when another rank has failed?"""
    return all(_CONSEQUENCE.search(raised.summary) for raised in errors)


def _hints(log: Log) -> list[Diagnosis]:
    found: dict[tuple[str, str], Diagnosis] = {}
    for line in log.lines:
        for signature in SIGNATURES:
            if signature.notice and signature.message.search(line.text):
                key = (signature.code, signature.cause_name)
                evidence = (f"line {line.number}: {line.text[:300]}",)
                sure: Level = "low" if signature.unsure else "medium"
                found.setdefault(key, Diagnosis(signature, sure, evidence, hint=True))
    return list(found.values())


def _confidence(signature: Signature, raised: Raised, models: Sequence[ModelState]) -> Level:
    if signature.unsure or (not raised.frames and signature.where is not None):
        return "low"
    parallel = any(model.parallel for model in models)
    if signature.sharded is not None and not parallel and signature.sharded(raised.frames) is None:
        return "low"
    sure = signature.checked == "reproduced" and not signature.several
    return "high" if sure and raised.frames else "medium"


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
    if shapes := described(raised.message):
        found.append(shapes)
    if match.line is not None:
        line = f"line {match.line.number}, before it: " if match.line.number else ""
        found.append(line + cut(match.line.text))
    place, doing_ = user_place(raised.frames), phase(raised.frames)
    if place:
        found.append(f"raised at {place}" + (f", {doing_}" if doing_ else ""))
    found += [_model(model) for model in models if model.checkpoints or model.parallel]
    return [*found, f"Versions: {signature.versions}"]


def _frame_line(failure: Failure, n: int, raised: Raised, index: int) -> str:
    frame = raised.frames[index]
    places = failure.places[n] if failure.places else ()
    line = f"line {places[index]}, " if index < len(places) else ""
    return f"{line}in the failing stack: {frame.place} in {frame.function}"


def cut(text: str) -> str:
    """The beginning of a long message."""
    return text if len(text) <= _LONGEST_SUMMARY else text[:_LONGEST_SUMMARY] + "…"


def _model(model: ModelState) -> str:
    parts = [*model.parallel, *model.checkpoints]
    if model.use_cache is not None:
        parts.append(f"use_cache={model.use_cache}")
    return f"{model.name}: {', '.join(parts)}"


_MOST_RANKS_NAMED = 4


def own_failure(ends: Sequence[RankEnd]) -> bool:
    """Did some rank fail by itself, rather than after another's end?"""
    return any(
        end.ending in ("raised", "exited") and not (end.errors and is_consequence(end.errors))
        for end in ends
    )


def crash_of(ends: Sequence[RankEnd]) -> Crash:
    """The crash for the result. ``ends`` holds at least one that failed."""
    first, ranks = _first(ends), tuple(ends)
    if first is None:
        return Crash("hung", None, _hung_headline(ends), None, ranks)
    if first.ending == "killed":
        rank = None if first.stack else first.rank
        return Crash("killed", rank, _killed_headline(first, ends), None, ranks)
    doing = phase(first.stack)
    headline = _headline(first, len(ends), doing) + _gone_before(first, ends)
    traceback = traceback_text(first.errors) if first.errors else None
    exited = first.ending == "exited"
    return Crash("exited" if exited else "raised", first.rank, headline, doing, ranks, traceback)


def findings_of(ends: Sequence[RankEnd]) -> tuple[Finding, ...]:
    """The known cause of the failure that came first, as a finding; empty where none is known."""
    first = _first(ends)
    if first is not None and first.ending == "killed":
        return ()
    if first is None:
        signature, evidence = hangs.of_ranks(ends)
        notes = tuple(f"rank {end.rank}: {note}" for end in ends for note in end.notes)
        return (finding_of(Diagnosis(signature, "high", (*evidence, *notes))),)
    failure = Failure(first.rank if len(ends) > 1 else None, 0, first.errors)
    # A warning of a step that succeeded does not explain why a later one fails.
    warned = () if first.steps else first.notes
    found = diagnose(failure, [LogLine(0, note, failure.rank) for note in warned], first.models)
    return (finding_of(found),) if found is not None else ()


def finding_of(diagnosis: Diagnosis) -> Finding:
    """A diagnosis in the result's words, with how it was checked as its last evidence."""
    known = diagnosis.signature
    checked = "Not reproduced here: this diagnosis rests on logs."
    if known.checked == "reproduced":
        checked = "A test script fails in the same way, on a CPU."
    return Finding(
        code=known.code,
        name=known.name,
        severity=known.severity,
        confidence=diagnosis.confidence,
        title=known.title,
        detail=known.cause,
        evidence=(*diagnosis.evidence, checked),
        fix=Fix(
            summary=known.fix,
            disposition="review",
            diff=None,
            keep=known.keep,
            remove=known.remove,
            docs=known.sources[0],
            reason=known.gradients or None,
        ),
        saving_ms=None,
        saving_pct=None,
    )


def traceback_text(errors: Sequence[Raised]) -> str:
    """The chain as Python prints a traceback, from what is known of it."""
    blocks = []
    for raised in errors:
        lines = ["Traceback (most recent call last):"] if raised.frames else []
        for frame in raised.frames:
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            if frame.source:
                lines.append(f"    {frame.source}")
        lines.append(f"{raised.type}: {raised.message}" if raised.message else raised.type)
        blocks.append("\n".join(lines))
    return "\n\n[then]\n\n".join(blocks)


def _first(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed by itself first; ``None`` where no rank did and they hang.

    Where all failures of the others follow from its death, the rank without a stack: a launcher
    that ends the others leaves their stacks.
    """
    failed = [end for end in ends if end.ending in ("raised", "exited")]
    own = [end for end in failed if own_failure([end])]
    # While ranks hang, a failure that follows from another's end explains nothing.
    if not own and any(end.ending == "hung" for end in ends):
        return None
    killed = [end for end in ends if end.ending == "killed"]
    outright = [end for end in killed if not end.stack]
    if not own and (outright or not failed):
        return (outright or killed)[0]
    return min(own or failed, key=lambda end: end.at or 0.0)


def _headline(end: RankEnd, ranks: int, doing: str | None) -> str:
    who = f"Rank {end.rank}" if ranks > 1 and end.rank is not None else "The script"
    if not end.errors:
        return f"{who} ended itself with a failure."
    what = f"raised {end.errors[-1].name}"
    if end.ending == "exited":
        what = f"ended itself with a failure after {end.errors[-1].name}"
    where = f" at {end.place}" if end.place else ""
    return f"{who} {what}{where}{f', {doing}' if doing else ''}."


def _gone_before(first: RankEnd, ends: Sequence[RankEnd]) -> str:
    """The ranks that had ended well before this rank failed without them."""
    gone = [str(end.rank) for end in ends if end.ending == "ended"]
    if not gone or own_failure([first]):
        return ""
    named = ", ".join(gone[:_MOST_RANKS_NAMED])
    return f" Before that, {'rank' if len(gone) == 1 else 'ranks'} {named} had ended."


def _killed_headline(end: RankEnd, ends: Sequence[RankEnd]) -> str:
    after = f" after {plural(end.steps, 'step')}" if end.steps else ""
    if end.stack:
        return f"The run was ended from outside{after}."
    silent = [str(one.rank) for one in ends if one.ending == "killed" and not one.stack]
    who = f"Rank {end.rank}" if len(ends) > 1 else "The script"
    if len(silent) > 1:  # whoever started them ended the others
        who = f"Of ranks {', '.join(silent[:_MOST_RANKS_NAMED])}, one"
    return (
        f"{who} ended without a message{after}: by kill -9, for lack of host memory or disk space, "
        "or in a crash of native code."
    )


def _hung_headline(ends: Sequence[RankEnd]) -> str:
    hung = [end for end in ends if end.ending == "hung"]
    if len(ends) == 1:
        return f"The script made no progress at {hung[0].place}."
    named = [f"rank {end.rank} at {end.place}" for end in hung]
    return f"The run hung: {first_few(named, _MOST_RANKS_NAMED)}."
