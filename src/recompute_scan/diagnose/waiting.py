"""Ranks that wait for each other: told from where they stand, or from what a log says of
collectives that did not finish (NCCL's watchdog, torch's own comparisons).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.crash import Frame, RankEnd
from recompute_scan.diagnose.hangs import (
    DIVERGED,
    NO_PROGRESS,
    ONE_BEHIND,
    RECOMPUTED_MESSAGE,
    SAVE_HANG,
    TIMED_OUT,
    UNCLEAR,
)
from recompute_scan.diagnose.places import activity, user_frame
from recompute_scan.frameworks.signature import Signature

_WATCHDOG = re.compile(
    r"\[(?:PG (?P<group>[^\[\]]{0,200}?) ?)?Rank (?P<rank>\d{1,18})\].{0,600}?"
    r"(?:Watchdog caught collective operation timeout: |\bWork )"
    r"WorkNCCL\((?P<work>[^)]{0,600}(?:\(ms\)[^)]{0,600})?)"
)
_GIVEN_UP = ("Watchdog caught", "timed out in blocking wait")
# "[PG ID 0 PG GUID 0(default_pg) Rank 1] … last enqueued work: 12, last completed work: 9".
_STATUS = re.compile(
    r"\[PG (?P<group>[^\[\]]{0,200}?) ?Rank (?P<rank>\d{1,18})\].{0,600}?work(?: sequence id)?: "
    r"(?P<sequence>\d{1,18}).{0,200}?last enqueued (?:NCCL )?work: (?P<enqueued>\d{1,18}), "
    r"last completed (?:NCCL )?work: (?P<completed>\d{1,18})"
)
_FIELD = re.compile(r"\b(\w{1,40})(?:\(ms\))?=(\w{1,80})")
_NUMBER = re.compile(r"\d{1,18}")
# torch's desync report (TORCH_NCCL_DESYNC_DEBUG) and its flight recorder's analyzer, torch 2.13.
_MISSING = re.compile(
    r"\[[\d, ]+\] (?:finished collective #\d+, but didn't join collective #\d+"
    r"|joined but didn't finish collective #\d+|are the lagging ranks that caused this timeout)"
    r"|Not all ranks joining collective|Error type: COLLECTIVE_STATE_MISMATCH"
)
_MISMATCH = re.compile(r"Error type: (?:COLLECTIVE_TYPE|SIZE_OR_SYNTAX|COLLECTIVE_DTYPE)_MISMATCH")
_MOST = 256


class Timeout(Struct, frozen=True):
    """A collective that NCCL's watchdog gave up: whose, and what it says of the work.

    Attributes:
        rank: The rank that gave up: the job's where its line says that, else the group's.
        line: 1-based number of the line.
        operation: Such as ``ALLREDUCE``.
        sequence: Its number within its process group; ``None`` where an old torch does not say.
        elements: Elements put in.
        group: The process group; ``None`` where the log does not say.
        completed: Number of the last collective of the group that this rank completed.
    """

    rank: int
    line: int
    operation: str
    sequence: int | None
    elements: int | None
    group: str | None = None
    completed: int | None = None


class Dumped(Struct, frozen=True):
    """A line in which torch itself compares the ranks.

    Attributes:
        line: 1-based number of the line.
        text: The line.
        mismatch: Whether ranks called different things, rather than some not at all.
    """

    line: int
    text: str
    mismatch: bool


class CollectiveReports:
    """Gathers both, line by line."""

    def __init__(self) -> None:
        self._timeouts: dict[tuple[int, int | None, str | None], Timeout] = {}
        self._dumped: list[Dumped] = []
        self._groups: dict[tuple[int, int], tuple[str, int]] = {}
        self._held: tuple[int, str] | None = None

    @property
    def listens(self) -> bool:
        """Whether the next line belongs to the one before."""
        return self._held is not None

    @property
    def timeouts(self) -> tuple[Timeout, ...]:
        """By rank, each with its group where any line names it."""
        found = map(self._with_status, self._timeouts.values())
        return tuple(sorted(found, key=lambda one: (one.rank, one.line)))

    @property
    def dumped(self) -> tuple[Dumped, ...]:
        """In the log's order."""
        return tuple(self._dumped)

    def read(self, number: int, text: str, rank: int | None = None) -> None:
        """Take in one line, of this rank of the job where the line says so."""
        if self._held is not None:
            first, begun = self._held
            self._held = None
            # A piece without a break in it is a whole line of somebody else.
            if "Watchdog caught" not in text:
                self._watchdog(first, begun + text, rank)
        given_up = any(words in text for words in _GIVEN_UP)
        if given_up and not self._watchdog(number, text, rank) and "Watchdog caught" in text:
            self._held = (number, text[-2000:])
        if (match := _STATUS.search(text)) is not None:
            key = (int(match["rank"]) if rank is None else rank, int(match["sequence"]))
            if len(self._groups) < _MOST:
                self._groups.setdefault(key, (match["group"].strip(), int(match["completed"])))
        mismatch = _MISMATCH.search(text) is not None
        if len(self._dumped) < _MOST and (mismatch or _MISSING.search(text)):
            self._dumped.append(Dumped(number, text.strip()[:300], mismatch))

    def _with_status(self, one: Timeout) -> Timeout:
        status = self._groups.get((one.rank, one.sequence)) if one.sequence is not None else None
        if status is None:
            return one
        return replace(one, group=one.group or status[0], completed=status[1])

    def _watchdog(self, number: int, text: str, rank: int | None) -> bool:
        match = _WATCHDOG.search(text)
        if match is None or not match["work"]:
            return False
        fields = dict(_FIELD.findall(match["work"]))
        if "OpType" not in fields:
            return False
        found = Timeout(
            rank=int(match["rank"]) if rank is None else rank,
            line=number,
            operation=fields["OpType"],
            sequence=_number(fields.get("SeqNum", "")),
            elements=_number(fields.get("NumelIn", "")),
            group=match["group"],
        )
        # Of the lines that repeat it, some name the group and some do not.
        unnamed = (found.rank, found.sequence, None)
        if found.group is not None and unnamed in self._timeouts:
            found = replace(found, line=self._timeouts.pop(unnamed).line)
        named = any(key[:2] == unnamed[:2] for key in self._timeouts)
        if len(self._timeouts) < _MOST and not (named and found.group is None):
            self._timeouts.setdefault((found.rank, found.sequence, found.group), found)
        return True


# A call of torch.distributed, seen from the inside of the stack.
_CALL = re.compile(
    r"torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional)\.py:(?P<name>\w+)$"
)
_LOADS_ALONE = re.compile(r"/torch/(?:serialization\.py|utils/data/)")
# Ranks may put in different numbers of elements, and still call the same collective. Not so in
# `_ALLGATHER_BASE` and `_REDUCE_SCATTER_BASE`, which take one tensor of the same size from each.
_UNEVEN = re.compile(r"ALLTOALL|SEND|RECV|^(?:ALL)?GATHER|^(?:REDUCE_)?SCATTER")
_WRAPPERS = {"wrapper", "wait", "_work_wait"}
_MESSAGES = re.compile(r"^(?:i?send|i?recv|batch_isend_irecv|(?:send|recv)_object_list)$")
_NOTED = re.compile(r"flight recorder has (?P<name>\S+), number (?P<number>\S+),")
# Frames of the waiting itself differ between ranks that are at the same place.
_LIBRARY_FRAMES = 40

Standing = tuple[object, ...]


def of_ranks(ranks: Sequence[RankEnd]) -> tuple[Signature, tuple[str, ...]]:
    """Why these ranks make no progress, and the evidence: where each of them stands.

    Ranks are at the same place where the user's line, the stack below it, the collective and its
    number agree. A save hang is one where a rank waits in a collective of a function that saves,
    and another rank is not saving.
    """
    evidence = tuple(_standing(one) for one in sorted(ranks, key=lambda one: one.rank or 0))
    hung = [one for one in ranks if one.ending == "hung"]
    # Where the others have ended well, one that still waits is as good as at another place.
    places = {_place(one) if one.ending == "hung" else (one.ending,) for one in ranks}
    if len(places) < 2:
        return NO_PROGRESS, evidence
    saving = [one for one in hung if is_saving(one.stack)]
    if len(saving) < len(ranks) and any(collective(one.stack) for one in saving):
        return SAVE_HANG, evidence
    waits = any(collective(one.stack) for one in hung)
    if any(_recomputes_a_message(one.stack) for one in hung) and not all(
        _recomputes_a_message(one.stack) for one in hung
    ):
        return RECOMPUTED_MESSAGE, evidence
    if waits and len(hung) == len(ranks) and any(_by_itself(one.stack) for one in hung):
        return ONE_BEHIND, evidence
    return DIVERGED, evidence


def is_saving(stack: Sequence[Frame]) -> bool:
    """Is saving what goes on there, by the innermost frame that tells?"""
    found = activity(stack)
    return found is not None and found[0] == "saving"


def collective(stack: Sequence[Frame]) -> str | None:
    """The outermost call of torch.distributed that the stack is in; ``None`` where in none."""
    for frame in stack:
        match = _CALL.search(frame.site)
        if match is not None and match["name"] not in _WRAPPERS:
            return match["name"]
    return None


def _by_itself(stack: Sequence[Frame]) -> bool:
    """Is it in a library that calls no collective, such as one that loads?

    Of the user's own line and of torch's others this cannot be told: collectives are also called
    from below Python, in the backward pass for instance, and waited for by reading a tensor.
    """
    if not stack or stack[-1] is user_frame(stack):
        return False
    where = stack[-1].site
    return "/torch/" not in where or _LOADS_ALONE.search(where) is not None


def _recomputes_a_message(stack: Sequence[Frame]) -> bool:
    found = activity(stack)
    call = collective(stack)
    recomputes = found is not None and found[0] == "recompute"
    return recomputes and call is not None and _MESSAGES.match(call) is not None


def _place(end: RankEnd) -> Standing:
    """The user's line, the functions below it, the collective, and its number where it is known."""
    frame = user_frame(end.stack)
    below = end.stack[end.stack.index(frame) + 1 :] if frame is not None else end.stack
    functions = tuple(one.site for one in below[:_LIBRARY_FRAMES] if not _CALL.search(one.site))
    noted = next((m for note in end.notes if (m := _NOTED.search(note))), None)
    number = (noted["name"], noted["number"]) if noted is not None else None
    return end.place, functions, collective(end.stack), number


def of_timeouts(timeouts: Sequence[Timeout]) -> tuple[Signature, tuple[str, ...]]:
    """Why collectives timed out, and the evidence, from the watchdog's own lines."""
    evidence = tuple(_timed_out(one) for one in timeouts)
    if len({_asked(one) for one in timeouts}) == 1:
        return TIMED_OUT, evidence
    if _parted(timeouts):
        return DIVERGED, evidence
    several = len({one.rank for one in timeouts}) < len(timeouts)
    groups = {_group(one) for one in timeouts}
    if several or len(groups - {None}) > 1:
        return UNCLEAR, evidence
    # Without the group, only one number with two operations shows ranks to have parted.
    if len({one.sequence for one in timeouts}) > 1 and None in groups:
        return UNCLEAR, evidence
    return DIVERGED, evidence


def _parted(timeouts: Sequence[Timeout]) -> bool:
    """Did two ranks of one group ask for different things under one number, whatever else waits?"""
    asked: dict[tuple[str, int], set[object]] = {}
    for one in timeouts:
        group = _group(one)
        if group is not None and one.sequence is not None:
            asked.setdefault((group, one.sequence), set()).add(_asked(one))
    return any(len(some) > 1 for some in asked.values())


def _asked(one: Timeout) -> tuple[str, int | None, int | None]:
    return one.operation, one.sequence, _size(one)


def _group(one: Timeout) -> str | None:
    """The group's name on all ranks; ``None`` where the log has none or a rank's own count.

    From torch 2.4 on the GUID is the name. Before, the number counts the groups that the rank is
    in, and 0 alone, the default group, is the same one everywhere.
    """
    if one.group is None:
        return None
    _, guid, name = one.group.partition("GUID ")
    if guid:
        return name.partition("(")[0]
    return "0" if one.group.removeprefix("ID ").split(" ")[0].split("(")[0] == "0" else None


def _size(one: Timeout) -> int | None:
    return None if _UNEVEN.search(one.operation) else one.elements


def _timed_out(one: Timeout) -> str:
    return (
        f"line {one.line}, rank {one.rank}: {one.operation}"
        + (f", number {one.sequence}" if one.sequence is not None else "")
        + (f", {one.elements} elements" if one.elements is not None else "")
        + (f", of process group {one.group}" if one.group else "")
        + (f"; it had completed number {one.completed}" if one.completed is not None else "")
    )


def _standing(one: RankEnd) -> str:
    if one.ending == "ended":
        return f"rank {one.rank}: has ended"
    inner = one.stack[-1] if one.stack else None
    frame = user_frame(one.stack)
    where = one.place or "a place that is not known"
    text = f"rank {one.rank}: at {where}"
    if frame is not None and frame.source:
        text += f" ({frame.source})"
    if inner is not None and inner is not frame:
        text += f", waiting in {inner.function} ({inner.file}:{inner.line})"
    call = collective(one.stack)
    if call is not None and (inner is None or call != inner.function):
        text += f", called by {call}"
    return text


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None
