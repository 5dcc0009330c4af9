"""Ranks that wait for each other, and processes that ended without an exception.

Hangs show in the stacks of the ranks, or in a log's lines on collectives that did not finish
(NCCL's watchdog, torch's own comparisons). An exception's class and message alone do not show them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.crash import Frame, RankEnd
from recompute_scan.diagnose.tracebacks import doing, user_frame
from recompute_scan.frameworks.base import CHECKPOINT_DOCS
from recompute_scan.frameworks.detect import NOTHING, Signature
from recompute_scan.units import plural

_DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"
_ELASTIC = "https://docs.pytorch.org/docs/stable/elastic/errors.html"

_SAVE_MORE = """\
```diff
-if rank == 0:
-    fabric.save("checkpoint.ckpt", state)
+fabric.save("checkpoint.ckpt", state)
 fabric.barrier()
```
"""

SAVE_HANG = Signature(
    code="RS204",
    cause_name="guarded-save",
    title="Ranks wait for each other while saving: one saves, and the others are elsewhere",
    cause="""All ranks must take part in saving a sharded model. Here they are at different places,
        as when the save is under `if rank == 0` (or is_main_process) and the others go on to a
        barrier.""",
    fix="""Call the save on every rank, and guard only the writing of gathered data. If all ranks
        do save and gathering is slow, raise the process group's timeout.""",
    more=_SAVE_MORE,
    keep="the save, called by all ranks",
    remove="the guard by rank around it",
    versions="FSDP, ZeRO-3, Fabric, accelerate; all versions.",
    sources=(
        "Lightning-AI/pytorch-lightning/issues/19780",
        "huggingface/accelerate/issues/2000",
        "pytorch/pytorch/issues/122903",
    ),
    checked="reproduced",
)
DIVERGED = Signature(
    code="RS210",
    cause_name="different-places",
    title="Ranks wait for each other at different places",
    cause="""Every rank must call the same collectives in the same order. Some took another path: a
        branch by rank, data that ended earlier, or an exception caught on one rank.""",
    fix="Make all ranks take the same path up to the two places that the report names.",
    sources=(_DISTRIBUTED,),
    checked="reproduced",
)
FINGERPRINT = replace(
    DIVERGED,
    cause_name="fingerprint",
    error=r"\w*Error",
    message=re.compile(r"Detected mismatch between collectives on ranks\."),
    title="Ranks called different collectives, or the same one with different shapes",
    fix="""Make all ranks call the same collectives with the same shapes in the same order. The
        message names both collectives, and the traceback the line.""",
    versions="torch with TORCH_DISTRIBUTED_DEBUG=DETAIL.",
    sources=("pytorch/pytorch/pull/79901", _DISTRIBUTED),
    checked="message",
)
COMPARED = replace(
    DIVERGED,
    cause_name="compared",
    title="torch compared the ranks' collectives: some rank called a different one",
    fix="""The ranks named in torch's report must take the others' path up to the collective in
        that report.""",
    versions="torch's flight recorder and its analyzer (torchfrtrace).",
    sources=("https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",),
    checked="message",
)
TIMED_OUT = Signature(
    code="RS209",
    cause_name="slow",
    title="A collective did not finish within the process group's timeout",
    cause="""The watchdog's lines name one collective. A rank that is not in them died, was slow or
        took another path, or the collective itself is stuck.""",
    fix="""Find the missing rank and the first error or stack of any rank. If it was only slow
        (loading, saving, compiling), pass a longer timeout to init_process_group.""",
    sources=(_DISTRIBUTED,),
)
NAMED = replace(
    TIMED_OUT,
    cause_name="named",
    title="torch compared the ranks, and some did not reach a collective",
    cause="The named ranks died, were slow, or took another path.",
    fix="""Read the log of the named ranks up to that collective. If they were only slow (loading,
        saving, compiling), pass a longer timeout to init_process_group.""",
    versions="torch with TORCH_NCCL_DESYNC_DEBUG=1, or its flight recorder's analyzer.",
    sources=("https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",),
)
UNCLEAR = replace(
    TIMED_OUT,
    cause_name="unclear",
    title="Collectives did not finish, and the log does not show whether they belong together",
    cause="""The ranks wait in different collectives. Process groups number their collectives
        separately, and the log does not show the groups.""",
    fix="""Find the first error of any rank. Run again with TORCH_FR_BUFFER_SIZE=2000 (before torch
        2.9 TORCH_NCCL_TRACE_BUFFER_SIZE), or under `recompute-scan run`.""",
)
GLOO = replace(
    TIMED_OUT,
    cause_name="gloo",
    error="RuntimeError",
    message=re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation to complete"),
    title="A collective over gloo timed out",
    cause="""This rank waited over gloo for another rank, which died, was slow, or took another
        path.""",
)
BARRIER = replace(
    GLOO,
    cause_name="barrier",
    message=re.compile(
        r"failed to pass monitoredBarrier in \d+ ms|successfully reached monitoredBarrier, but"
    ),
    title="Some ranks did not reach a monitored barrier in time",
    cause="The named ranks died, were slow, or took another path.",
    fix="""Read the named ranks' logs. If they were only slow (loading, preparing data), raise the
        barrier's timeout.""",
)
NO_PROGRESS = Signature(
    code="RS211",
    cause_name="waiting",
    title="The run made no progress until recompute-scan ended it",
    cause="All ranks were at the same place when recompute-scan ended the run.",
    fix="""Look at the place that the report names. If the work is only long, raise `--timeout`,
        or wait forever with `--timeout 0`.""",
    sources=("https://docs.python.org/3/library/faulthandler.html",),
    checked="reproduced",
)
ONE_BEHIND = replace(
    NO_PROGRESS,
    cause_name="one-behind",
    title="Ranks wait for one that is in no collective",
    cause="""Some ranks wait in a collective while another loads, evaluates or writes alone, or is
        stuck.""",
    fix="""Look at the rank outside the collective. If its work is only long, raise `--timeout` and
        the process group's timeout, or let all ranks share the work.""",
)
RECOMPUTED_MESSAGE = Signature(
    code="RS214",
    cause_name="recomputed",
    error=r"\w*Error",
    message=GLOO.message,
    title="A checkpointed block's recompute waits in a send or recv between ranks",
    cause="""The recompute repeats the block's send or recv. The other rank sends once, unless it
        recomputes the same block at the same time.""",
    fix="Take point-to-point calls out of checkpointed blocks.",
    sources=(CHECKPOINT_DOCS,),
    checked="reproduced",
)
KILLED = Signature(
    code="RS212",
    cause_name="sigkill",
    error="OutOfMemoryError",
    message=re.compile(r"^Task was killed due to the node running low on memory"),
    title="A process was ended from outside, by SIGKILL",
    cause="""Mostly the kernel ends it for lack of host memory. Ray's monitor, a scheduler's limit
        or a person can do it too.""",
    fix="""Read the kernel's log (dmesg) and the scheduler's. If host memory ran out: fewer loader
        workers, memory-mapped loading or loading on one rank, less offloading.""",
    sources=(_ELASTIC,),
)
CRASHED = replace(
    KILLED,
    code="RS213",
    cause_name="native",
    message=NOTHING,
    title="A process crashed in native code",
    cause="""SIGSEGV, SIGILL and SIGFPE come from native code: an extension or driver that does not
        fit torch, or a bug in one.""",
    fix="""Run with PYTHONFAULTHANDLER=1 to print the Python stack of the crash. Then check the
        version of the extension it names.""",
    sources=("https://docs.python.org/3/library/faulthandler.html", _ELASTIC),
)

BUS = replace(
    CRASHED,
    cause_name="bus",
    title="A process touched memory that could not be supplied (SIGBUS)",
    cause="""A memory-mapped file has no room, or was truncated. Usually it is in /dev/shm, which
        loader workers, NCCL and ZeRO share; a container has 64 MB by default.""",
    fix="""Check `df -h /dev/shm`, and give the container more (docker run --shm-size=16g, or
        --ipc=host). If there is room, look for a mapped file that was truncated.""",
    sources=("deepspeedai/DeepSpeed/issues/4002", "https://docs.docker.com/engine/containers/run/"),
)

# Recognised by an exception, after everything that says more.
BY_EXCEPTION: tuple[Signature, ...] = (FINGERPRINT, BARRIER, GLOO, KILLED)
ALL: tuple[Signature, ...] = (
    *(SAVE_HANG, DIVERGED, FINGERPRINT, COMPARED, TIMED_OUT, NAMED, UNCLEAR),
    *(GLOO, BARRIER, NO_PROGRESS, ONE_BEHIND, RECOMPUTED_MESSAGE, KILLED, CRASHED, BUS),
)

_WATCHDOG = re.compile(
    r"\[(?:PG (?P<group>[^\[\]]{0,200}?) ?)?Rank (?P<rank>\d{1,18})\].{0,600}?"
    r"(?:Watchdog caught collective operation timeout: {0,9}|\bWork )"
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
    """A collective that NCCL's watchdog gave up.

    Attributes:
        rank: The rank that gave up: the job's where its line says that, else the group's.
        line: 1-based number of the line.
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
    """A line in which torch itself compares the ranks: whether they called different things
    (``mismatch``), rather than some not at all.
    """

    line: int
    text: str
    mismatch: bool


class CollectiveReports:
    """Gathers both, line by line; lines of torch itself are in ``dumped``."""

    def __init__(self) -> None:
        self._timeouts: dict[tuple[int, int | None, str | None], Timeout] = {}
        self.dumped: list[Dumped] = []
        self._groups: dict[tuple[int, int | None], tuple[str, int]] = {}
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
        if len(self.dumped) < _MOST and (mismatch or _MISSING.search(text)):
            self.dumped.append(Dumped(number, text.strip()[:300], mismatch))

    def _with_status(self, one: Timeout) -> Timeout:
        group, completed = self._groups.get((one.rank, one.sequence), (None, None))
        return replace(one, group=one.group or group, completed=completed)

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
_IN_RECOMPUTE, _SAVES = doing("recompute"), doing("saving")
# Frames of the waiting itself differ between ranks that are at the same place.
_LIBRARY_FRAMES = 40


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
    saving = [one for one in hung if _SAVES(one.stack) is not None]
    if len(saving) < len(ranks) and any(collective(one.stack) for one in saving):
        return SAVE_HANG, evidence
    waits = any(collective(one.stack) for one in hung)
    if len({_recomputes_a_message(one.stack) for one in hung}) > 1:
        return RECOMPUTED_MESSAGE, evidence
    if waits and len(hung) == len(ranks) and any(_by_itself(one.stack) for one in hung):
        return ONE_BEHIND, evidence
    return DIVERGED, evidence


def collective(stack: Sequence[Frame]) -> str | None:
    """The outermost call of torch.distributed that the stack is in; ``None`` where in none."""
    calls = (match["name"] for frame in stack if (match := _CALL.search(frame.site)))
    return next((name for name in calls if name not in _WRAPPERS), None)


_PLAIN = {"ALLREDUC", "ALLGATHE", "ALLTOALL", "BROADCAS", "REDUCESC"}


def is_other(stack: Sequence[Frame], timeouts: Sequence[Timeout]) -> bool:
    """Is the stack in a collective that no timeout names? Other calls, such as those for objects
    and barriers, are built of these.
    """
    call = collective(stack) or ""
    kinds = {_kind(one.operation) for one in timeouts}
    known = "object" not in call and kinds | {_kind(call)} <= _PLAIN
    return known and _kind(call) not in kinds


def _kind(name: str) -> str:
    """The collective alone: the same for ``all_gather_into_tensor`` and ``_ALLGATHER_BASE``."""
    return name.replace("_", "").upper()[:8]


def _by_itself(stack: Sequence[Frame]) -> bool:
    """Is it in a library that calls no collective, such as one that loads?

    The user's own line and torch's other lines do not show it: collectives are also called from
    below Python, in the backward pass for instance, and waited for by reading a tensor.
    """
    if not stack or stack[-1] is user_frame(stack):
        return False
    where = stack[-1].site
    return "/torch/" not in where or _LOADS_ALONE.search(where) is not None


def _recomputes_a_message(stack: Sequence[Frame]) -> bool:
    call = collective(stack)
    return _IN_RECOMPUTE(stack) is not None and call is not None and bool(_MESSAGES.match(call))


def _place(end: RankEnd) -> tuple[object, ...]:
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
    return one.operation, one.sequence, None if _UNEVEN.search(one.operation) else one.elements


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


def _timed_out(one: Timeout) -> str:
    return (
        f"line {one.line}, rank {one.rank}: {one.operation}"
        + (f", number {one.sequence}" if one.sequence is not None else "")
        + (f", {plural(one.elements, 'element')}" if one.elements is not None else "")
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
