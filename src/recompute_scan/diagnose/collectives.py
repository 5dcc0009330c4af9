"""What a log says of collectives that did not finish: NCCL's watchdog, torch's own comparisons."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_WATCHDOG = re.compile(
    r"\[(?:PG (?P<group>[^\]]*?) ?)?Rank (?P<rank>\d+)\](?P<before>.*?)"
    r"(?:Watchdog caught collective operation timeout: |\bWork )"
    r"WorkNCCL\((?P<work>[^)]*(?:\(ms\)[^)]*)?)"
)
_GIVEN_UP = ("Watchdog caught", "timed out in blocking wait")
# "[PG ID 0 PG GUID 0(default_pg) Rank 1] … last enqueued work: 12, last completed work: 9".
_STATUS = re.compile(
    r"\[PG (?P<group>[^\]]*?) ?Rank (?P<rank>\d+)\].*?work(?: sequence id)?: (?P<sequence>\d+)"
    r".*?last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: "
    r"(?P<completed>\d+)"
)
_FIELD = re.compile(r"(\w+)(?:\(ms\))?=(\w+)")
# torch's desync report (TORCH_NCCL_DESYNC_DEBUG) and its flight recorder's analyzer, torch 2.13.
_MISSING = re.compile(
    r"\[[\d, ]+\] (?:finished collective #\d+, but didn't join collective #\d+"
    r"|joined but didn't finish collective #\d+|are the lagging ranks that caused this timeout)"
    r"|Not all ranks joining collective|Error type: COLLECTIVE_STATE_MISMATCH"
)
_MISMATCH = re.compile(r"Error type: (?:COLLECTIVE_TYPE|SIZE_OR_SYNTAX|COLLECTIVE_DTYPE)_MISMATCH")
_MOST = 256


@dataclass(frozen=True)
class Timeout:
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


@dataclass(frozen=True)
class Dumped:
    """A line in which torch itself compares the ranks.

    Attributes:
        line: 1-based number of the line.
        text: The line.
        mismatch: Whether ranks called different things, rather than some not at all.
    """

    line: int
    text: str
    mismatch: bool


class Collectives:
    """Gathers both, line by line."""

    def __init__(self) -> None:
        self._timeouts: dict[tuple[int, int | None], Timeout] = {}
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
        sequence, elements = fields.get("SeqNum", ""), fields.get("NumelIn", "")
        found = Timeout(
            rank=int(match["rank"]) if rank is None else rank,
            line=number,
            operation=fields["OpType"],
            sequence=int(sequence) if sequence.isdigit() else None,
            elements=int(elements) if elements.isdigit() else None,
            group=match["group"],
        )
        if len(self._timeouts) < _MOST:
            self._timeouts.setdefault((found.rank, found.sequence), found)
        return True
