"""From the ranks' ends to what the result says of them: the crash, and a finding with its fix."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.crash import Crash, Raised, RankEnd
from recompute_scan.diagnose.classify import (
    Diagnosis,
    diagnose,
    how_checked,
    is_consequence,
)
from recompute_scan.diagnose.places import phase
from recompute_scan.diagnose.tracebacks import Failure
from recompute_scan.diagnose.waiting import of_ranks
from recompute_scan.frameworks.signature import Beside
from recompute_scan.result import Finding, Fix

_MOST_RANKS_NAMED = 4


def own_failure(ends: Sequence[RankEnd]) -> bool:
    """Did some rank fail for reasons of its own, rather than for another's end?"""
    return any(
        end.ending in ("raised", "exited") and not (end.errors and is_consequence(end.errors))
        for end in ends
    )


def crash_of(ends: Sequence[RankEnd]) -> Crash:
    """What the result says of a run that ended so. ``ends`` holds at least one that failed."""
    first = _first(ends)
    if first is None:
        return Crash(
            kind="hung",
            rank=None,
            headline=_hung_headline(ends),
            phase=None,
            ranks=tuple(ends),
        )
    if first.ending == "killed":
        return Crash(
            kind="killed",
            rank=None if first.stack else first.rank,
            headline=_killed_headline(first, ends),
            phase=None,
            ranks=tuple(ends),
        )
    doing = phase(first.stack)
    return Crash(
        kind="exited" if first.ending == "exited" else "raised",
        rank=first.rank,
        headline=_headline(first, len(ends), doing) + _gone_before(first, ends),
        phase=doing,
        ranks=tuple(ends),
        traceback=traceback_text(first.errors) if first.errors else None,
    )


def findings_of(ends: Sequence[RankEnd]) -> tuple[Finding, ...]:
    """The known cause of the failure that came first, as a finding; empty where none is known."""
    first = _first(ends)
    if first is not None and first.ending == "killed":
        return ()
    if first is None:
        signature, evidence = of_ranks(ends)
        notes = tuple(f"rank {end.rank}: {note}" for end in ends for note in end.notes)
        evidence = (*evidence, *notes, how_checked(signature))
        return (finding_of(Diagnosis(signature, "high", evidence)),)
    failure = Failure(first.rank if len(ends) > 1 else None, 0, first.errors)
    # What was warned of at a step that succeeded does not explain why a later one fails.
    warned = () if first.steps else first.notes
    found = diagnose(failure, [Beside(0, note, failure.rank) for note in warned], first.models)
    return (finding_of(found),) if found is not None else ()


def finding_of(diagnosis: Diagnosis) -> Finding:
    """A diagnosis in the result's words."""
    known = diagnosis.signature
    return Finding(
        code=known.code,
        name=known.name,
        severity=known.severity,
        confidence=diagnosis.confidence,
        title=known.title,
        detail=known.cause,
        evidence=diagnosis.evidence,
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

    Where all that the others raised follows from its death, the rank that left no word: of those
    that a launcher ends for its sake there are stacks.
    """
    failed = [end for end in ends if end.ending in ("raised", "exited")]
    own = [end for end in failed if own_failure([end])]
    # What a rank raised because another is gone explains nothing beside ranks that hang.
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
    """Who had ended well before this rank failed for want of the others."""
    gone = [str(end.rank) for end in ends if end.ending == "ended"]
    if not gone or own_failure([first]):
        return ""
    named = ", ".join(gone[:_MOST_RANKS_NAMED])
    return f" Before that, {'rank' if len(gone) == 1 else 'ranks'} {named} had ended."


def _killed_headline(end: RankEnd, ends: Sequence[RankEnd]) -> str:
    after = f" after {end.steps} steps" if end.steps else ""
    if end.stack:
        return f"The run was ended from outside{after}."
    silent = [str(one.rank) for one in ends if one.ending == "killed" and not one.stack]
    who = f"Rank {end.rank}" if len(ends) > 1 else "The script"
    if len(silent) > 1:  # whoever started them ended the others
        who = f"Of ranks {', '.join(silent[:_MOST_RANKS_NAMED])}, one"
    return (
        f"{who} ended without a word{after}: by kill -9, for want of memory, or in a crash of "
        "native code."
    )


def _hung_headline(ends: Sequence[RankEnd]) -> str:
    hung = [end for end in ends if end.ending == "hung"]
    if len(hung) == 1 and len(ends) == 1:
        return f"The script made no progress at {hung[0].place}."
    named = [f"rank {end.rank} at {end.place}" for end in hung[:_MOST_RANKS_NAMED]]
    more = len(hung) - len(named)
    return f"The run hung: {', '.join(named)}{f' and {more} more' if more > 0 else ''}."
