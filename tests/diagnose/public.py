"""Logs from public threads, and written ones: what each shows, and in which part it is.

A file of ``corpus/public`` holds records. Each begins with ``=== owner/name#number | label |
basis``: the thread, what its log shows, and who established that. The log follows. Labels are
code and cause (``RS101-kv-cache``), or ``none`` where nothing we know ended the run. After a slash
stand answers that say less and are not false; they count as no answer. ``none`` there means that
the thread knows the cause and the excerpt does not show it.

``later.txt`` was collected and labelled when the rules stood, and is a group of its own: its texts
were new to whoever wrote the rules, which those of the half kept aside were not. So was
``newest.txt``, by somebody who had not written them: six of its logs got a wrong cause then (at
medium confidence), and the rules were changed. ``recent.txt`` came after that, one half of it built
on: none of its logs got a wrong cause, and host memory that ran out got its code then.
``fresh.txt``, ``unseen.txt`` and ``since.txt`` followed, split in the same way, and are of the
same two parts. ``last.txt`` came after all these, split in the same way: one half was built on,
and the other scored once; then it was built on too. ``kept.txt`` and ``final.txt`` were each
scored once after that, and then built on.

``limits.txt`` and ``sixth.txt`` hold failures that the codes from RS130 on are for, and look-alikes
of them. They were labelled and committed before those rules were written, by whoever wrote the
rules then; a hash of the thread's name split them. The rules were mended on ``limits``, and
``sixth`` was scored once after that. Eight older logs, for which there was no code before, got the
labels of the new codes at the same time, by what their threads say.

``fifth.txt`` is the part that is ``unseen``: labelled and committed when the rules stood, and
scored once. Do not look at its answers one by one. Who does so, or changes a rule for it, moves it
to ``last`` and collects another.

``corpus/written`` holds logs that were written after public ones of the same kind, with a name of
their own for the thread, and labelled by what the text proves before the program saw them. The
rules were mended on ``first``, and ``aside`` was looked at once after that. ``threads`` and
``threads-kept`` came later, each log named after the thread whose error lines it has; the stacks
above these were written. The rules were mended on the first, and a hash of the name split them.

The excerpts are what the programs printed, cut to the telling lines. Names in paths are replaced;
where an excerpt ended before the line that names the exception, that line is the thread's title.
"""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from recompute_scan.diagnose.outcome import Findings, diagnose_log, lines_of, read_log
from tests.diagnose.corpus import answer

FOLDER = Path(__file__).with_name("corpus") / "public"
WRITTEN = FOLDER.with_name("written")
_MARK = "=== "
# What restates a warning that stands in the log is true of any log that holds it.
_ALWAYS_TRUE = ("RS124-warning", "RS125-all-gather", "RS125-lightning")

Half = Literal[
    "built on",
    "kept aside",
    "later",
    "newest",
    "recent",
    "recent, aside",
    "last",
    "last, aside",
    "limits",
    "limits, aside",
    "unseen",
    "written",
    "written, aside",
]
Outcome = Literal["right", "none", "wrong"]
# Ours and visible; ours by what the thread says, and not visible in the excerpt; not ours.
Group = Literal["ours", "not shown", "not ours"]

# What nobody has looked at since it was labelled.
UNSEEN = FOLDER / "fifth.txt"
# The parts that are files; a hash splits the others, so that no one chose.
_PARTS: dict[str, Half] = {
    "later": "later",
    "newest": "newest",
    "limits": "limits",
    "sixth": "limits, aside",
    UNSEEN.stem: "unseen",
    "first": "written",
    "aside": "written, aside",
    "threads": "written",
    "threads-kept": "written, aside",
}
HALVES: tuple[Half, ...] = get_args(Half)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class PublicLog:
    """One log of one thread."""

    thread: str
    label: str
    weaker: tuple[str, ...]
    basis: str
    text: str
    file: str = ""

    @property
    def group(self) -> Group:
        """Whether there is something to recognise."""
        if self.label == "none":
            return "not ours"
        return "not shown" if "none" in self.weaker else "ours"

    @property
    def half(self) -> Half:
        """Which part it is of."""
        even = hashlib.sha256(self.thread.encode()).digest()[0] % 2 == 0
        if self.file in {"recent", "fresh", "unseen", "since"}:
            return "recent" if even else "recent, aside"
        if self.file in {"last", "kept", "final"}:
            return "last" if even else "last, aside"
        return _PARTS.get(self.file, "built on" if even else "kept aside")

    def found(self) -> Findings:
        """What the program says."""
        return _diagnosed(self.text)

    def outcome(self) -> Outcome:
        """How that compares with the label."""
        found = self.found()
        said = answer(found)
        hints = {f"{one.signature.code}-{one.signature.cause_name}" for one in found.hints}
        told = hints.difference(_ALWAYS_TRUE) | ({said} if found.cause and said else set())
        if said == self.label:
            return "right"
        if told <= {self.label, *self.weaker}:
            return "none"
        return "wrong"


@cache
def _diagnosed(text: str) -> Findings:
    return diagnose_log(read_log(lines_of(io.BytesIO(text.encode()))))


@dataclass(frozen=True)
class Score:
    """How many logs of a group, in one half, were answered rightly, not at all, and wrongly."""

    half: Half
    group: Group
    outcomes: dict[Outcome, int]

    @property
    def logs(self) -> int:
        """How many there are."""
        return sum(self.outcomes.values())


def scores(logs: list[PublicLog]) -> list[Score]:
    """Every part that these are of, each group."""
    found = []
    for half in HALVES:
        for group in GROUPS:
            some = [one.outcome() for one in logs if (one.half, one.group) == (half, group)]
            if some:
                found.append(Score(half, group, {name: some.count(name) for name in OUTCOMES}))
    return found


def public_logs() -> list[PublicLog]:
    """Those of public threads, in the order of the files."""
    return _logs(FOLDER)


def written_logs() -> list[PublicLog]:
    """Those that were written, in the order of the files."""
    return _logs(WRITTEN)


def _logs(folder: Path) -> list[PublicLog]:
    paths = sorted(folder.glob("*.txt"))
    return [one for path in paths for one in _records(path.read_text("utf-8"), path.stem)]


def _records(text: str, file: str) -> Iterator[PublicLog]:
    for record in text.split("\n" + _MARK):
        head, _, body = record.removeprefix(_MARK).partition("\n")
        thread, labels, basis = (part.strip() for part in head.split(" | "))
        label, *weaker = labels.split("/")
        yield PublicLog(thread, label, tuple(weaker), basis, body + "\n", file)
