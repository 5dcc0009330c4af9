"""One line of a log: its rank, whether it matters, and launchers' words on ended processes."""

from __future__ import annotations

import re
import signal

import msgspec
from msgspec import Struct

from recompute_scan.frameworks.registry import COMMANDS

# Prefixes that programs put before every line. Each ends with the one blank that belongs to it, so
# that the rest keeps its indentation.
_STAMP = re.compile(r"\s*\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?(?:\s|$)")
_RANK = re.compile(
    r"\s*(?:\[rank(?P<rank>\d{1,18})\]:?\s?|\[default(?P<tee>\d{1,18})\]:|(?P<task>\d{1,5}): "
    r"|\((?P<actor>[\w.:\- ]{0,200}pid=\d{1,18}(?!\d)[^)]{0,200})\)\s?)"
)
_OTHERS = re.compile(
    r"> ?|[`*]+(?=\[)"  # a quotation
    r"|\[\d+\] (?=\[rank)"  # a count of lines
    r"|\d{1,3}(?:\.\d{1,3}){3}: "  # pdsh, with the host's address
    # docker compose, with the container's name; a logger's level looks alike
    r"|(?!(?:DEBUG|INFO|SUCCESS|WARNING|ERROR|CRITICAL|FATAL)\b)\w[\w.\-]{0,80} +\| "
    r"| +\| "  # a group of exceptions
    r"|E {3,}(?=\S)"  # pytest
    r"|(?:ERROR|WARNING|INFO|CRITICAL|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./\-]+:\d+\] ?"  # vLLM
)
_MOST_PREFIXES = 6
# Where a line of JSON has what a program printed: loggers', Docker's, Kaggle's.
_JSON_TEXT = ("exception", "exc_info", "log", "data", "message")
_DIGITS = re.compile(r"\d")
_BOX = "│".encode()

# Notebooks make links of places: "File [~/a.py:12](http://…), in f(x)".
_LINK = re.compile(r"\[([^\[\]\s]*\.py(?::\d+)?)\]\(https?://[^)\s\[]*\)")

_WARNINGS = (
    *("Warning: ", "use_reentrant", "requires_grad=True", "AllGather", "ed layers"),
    " with gradient checkpointing",
)
HEADER = re.compile(r"(?P<before>.*?)Traceback \(most recent call last\)(?::?\s*| ─*[╮|]?\s*)$")
# A name has up to 12 parts of 80 characters: without a bound, the time for a line grows with its
# square.
_NAME = r"(?:[A-Za-z_]\w{0,80}\.){0,12}[A-Z]\w{0,80}(?:Error|Exception|Warning)"
_TYPE = rf"(?P<type>{_NAME}):(?: |(?=[A-Z]))(?P<message>.*)"
TYPED = re.compile(rf"(?:^|[\s:|*`]){_TYPE}")
# An exception that is named without a traceback: the line says nothing else, or says that
# something failed. One that is in a sentence is spoken of.
LOOSE = re.compile(
    r"(?:[\s*_`>\[\]]{0,80}|[^:.]{0,80}?\b[Ee](?:rror|xception)s?(?: message)?: "
    r"|.*\b(?:ERROR|CRITICAL|FATAL)\b.{0,120}?[\s:\]]"
    rf"|.*\b(?:[Ff]ailed with|[Uu]ncaught|[Uu]nhandled)\b.{{0,40}}?[\s:]){_TYPE}"
)


# Words of lines that matter outside a traceback too; Python 3.13 colours the name alone.
_TELLING = (
    b"Error:|Error\x1b|File |.py in |Traceback (most|Exception: |Warning: |ollective|"
    b"ProcessGroupNCCL|Root Cause (first|return code = -| signal |core dumped|Killed|"
    b"egmentation fault|Fatal Python error|zsh: |xit|terminated with code -|slurmstepd: err|"
    b"TERM_MEMLIMIT|PBS: job killed|fatal exception: |srun: error|*** SIG|Signal: |: line |"
    b"oom_kill event|oom-kill event|killed due to memory pressure|_MISMATCH|use_reentrant|"
    b"requires_grad=True|AllGather|checkpointed layers| with gradient checkpointing|.py](http|"
    b"ecompil|cache_size_limit"
).split(b"|")
_TELLING.append(_BOX)


def is_telling(line: bytes) -> bool:
    """Whether a line matters outside a traceback too.

    Looking for each word in turn is many times faster than one regular expression for all.
    """
    return any(word in line for word in _TELLING)


def printed(text: str) -> list[str]:
    """The lines that a program printed into this line of JSON; the line itself where it is none."""
    body = text.strip().strip("[],")
    if not body.startswith('{"') or not body.endswith("}"):
        return [text]
    try:
        fields = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):  # nested too deep
        return [text]
    texts = [one for key in _JSON_TEXT if isinstance(one := fields.get(key), str)] or [text]
    telling = (one for one in texts if is_telling(one.encode("utf-8", "replace")))
    return next(telling, texts[0]).rstrip("\r\n").split("\n")


def owner(text: str) -> tuple[str, int | None, bool, str]:
    """The writer of a line: a key, the rank where the line names it, whether a time is before it,
    and the line without its prefixes.
    """
    key, rank, stamped = "", None, False
    for _ in range(_MOST_PREFIXES):
        if (match := _RANK.match(text)) is not None:
            number = match["rank"] or match["tee"] or match["task"]
            if number is not None:
                rank, key = int(number), f"rank {number}"
            else:
                key = match["actor"]
        elif not stamped and (match := _STAMP.match(text)) is not None:
            stamped = True
        elif (match := _OTHERS.match(text)) is None:
            break
        text = text[match.end() :]
    if ".py" in text and "](http" in text:
        text = _LINK.sub(r"\1", text)
    return key, rank, stamped, text


def shape(text: str) -> str:
    """The text with every digit made a 0, as the prefixes of one program's lines agree."""
    return _DIGITS.sub("0", text)


def is_warning(text: str) -> bool:
    """Whether the line is a warning that some diagnosis looks for."""
    return any(words in text for words in _WARNINGS)


# torch.compile compiles a function again, or unsloth gives up.
RECOMPILATION = re.compile(
    r"Recompiling function |_dynamo hit config\.(?:accumulated_)?(?:recompile|cache_size)_limit"
    r"|torch\.compile ran out of recompilation cache"
)

# The programs that start training, but for Python itself.
_PROGRAMS = "|".join(sorted({rf"\b{re.escape(one.split()[0])}\b" for one in COMMANDS}))
_NATIVE = "Segmentation fault|Bus error|Illegal instruction|Floating[ -]point exception"
_FAILED = re.compile(
    r"failed \(exitcode: (?P<status>-?\d{1,18})\) local_rank: \d{1,18}"
    r"|died with <Signals\.(?P<signal>SIG\w+): \d+>"
    r"|exits with return code = (?P<code>-\d{1,18})"
    r"|ProcessExitedException: process \d+ terminated with signal (?P<spawned>SIG\w+)"
    r"|finished with exit code \d+ \(interrupted by signal \d+:? ?(?P<ide>SIG\w+)\)"
    # SLURM counts what the kernel ended for want of memory, and Ray what it ended itself.
    r"|(?P<memory>Detected [1-9]\d{0,8} oom[_-]kill event"
    r"|\b[1-9]\d{0,8} Workers \(tasks / actors\) killed due to memory pressure"
    # The kernel's own words, and Kubernetes'.
    r"|[Oo]ut of memory: Kill(?:ed)? process \d+ \((?:python|pt_main|ray)"
    r"|[Rr]eason\W{1,9}OOMKilled\b|Worker exit type: NODE_OUT_OF_MEMORY"
    # Limits that schedulers set for the job.
    r"|slurmstepd: error: .{0,80}[Ee]xceeded .{0,12}memory limit|TERM_MEMLIMIT: job killed"
    r"|PBS: job killed: v?mem)"
    # A shell's status for a signal, as containers hand it on, and Lightning's of a rank it started.
    r"|[Ee]xit(?:ed)?(?: with)?[ _]?(?:[Cc]ode|[Ss]tatus)[:=\s]{1,9}(?P<exit>13[25679])"
    r"(?=$|\s*[(,;.])"
    r"|terminated with code (?P<child>-\d{1,18})"
    # gdb.
    r"|(?:Program|Thread [^,]{1,80}) (?:terminated with|received) signal "
    r"(?P<gdb>SIG(?:SEGV|BUS|ILL|FPE|KILL))\b"
    # Shells, about their commands and about a line of a script. Then faulthandler.
    rf"|(?P<shell>(?i:{_NATIVE})) +\(core dumped\)"
    rf"|: line \d{{1,9}}: +\d{{1,9}} (?P<job>Killed|{_NATIVE}) "
    rf".{{0,200}}?(?:python|\b(?:ba|z)?sh \S|{_PROGRAMS})"
    r"|^[\s*`]*(?P<alone>Killed|Segmentation fault)(?:: \d+)?[\s*`]*$"
    rf"|\bzsh: (?P<zsh>killed|(?i:{_NATIVE})|illegal hardware instruction) "
    # Windows, in an IDE and alone.
    r"|(?P<windows>finished with exit code -1073741819\b|^Windows fatal exception: access viol)"
    rf"|^Fatal Python error: (?P<python>{_NATIVE})$"
    # srun of a task, mpirun of a rank.
    r"|srun: error: \S{1,100}: tasks? [\d,\-]{1,100}: "
    rf"(?P<task>Killed|Out Of Memory|{_NATIVE})\b"
    r"|exited on signal (?P<rank_by>4|7|8|9|11) \("
    # Handlers in native code: UCX's, absl's and glog's (Ray), Open MPI's.
    r"|Caught signal (?P<caught_by>4|7|8|11) \("
    r"|\*\*\* (?P<handler>SIG(?:SEGV|BUS|ILL|FPE)) (?:\(@0x\w+\) )?received "
    r"|^(?:\[[\w.\-]+:\d+\] )?Signal: [A-Z][\w ]{3,30} \((?P<mpi_by>4|7|8|11)\)$"
)
_SIGNAL = {"segmentation fault": "SIGSEGV", "bus error": "SIGBUS", "windows": "SIGSEGV"}
_SIGNAL |= dict.fromkeys(("floating point exception", "floating-point exception"), "SIGFPE")
_SIGNAL |= dict.fromkeys(("illegal instruction", "illegal hardware instruction"), "SIGILL")
_SIGNAL |= dict.fromkeys(("killed", "out of memory", "memory"), "SIGKILL")
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_RANK_FIELD = re.compile(r"^\s*rank\s*:\s*(?P<rank>\d{1,18}) ")
_STATUS = re.compile(r"^\s*exitcode\s*:\s*(?P<status>-?\d{1,18}) ")


class Ended(Struct, frozen=True):
    """The process that a launcher saw end first, by a signal such as ``SIGKILL``, and its line."""

    signal: str
    line: int
    text: str


class Launcher:
    """Reads launchers' lines: the rank that failed first, and its signal.

    Attributes:
        listens: Whether the lines of a summary are still to come.
    """

    def __init__(self) -> None:
        self.first_rank: int | None = None
        self.ended: Ended | None = None
        self._said = False
        self.listens = False

    def read(self, number: int, text: str) -> None:
        """Take in one line."""
        if _ROOT.search(text):
            self.listens = True
            return
        if self.listens:
            self._summary(number, text)
            return
        if not self._said and (match := _FAILED.search(text)) is not None:
            # Each alternative has one group, which holds a signal, a status or words.
            kind = match.lastgroup or ""
            word = match[kind]
            name = _SIGNAL.get(kind) or _SIGNAL.get(word.lower()) or word
            if (status := name.removeprefix("-")).isdigit():
                name = _name(-int(status) if kind.endswith("_by") else int(name)) or ""
            self._note(number, text, name or None)

    def _summary(self, number: int, text: str) -> None:
        if self.first_rank is None and (match := _RANK_FIELD.match(text)) is not None:
            self.first_rank = int(match["rank"])
        elif (match := _STATUS.match(text)) is not None:
            self.listens = False
            # The summary knows which one was first; a line before it may speak of another.
            self._note(number, text, _name(int(match["status"])))

    def _note(self, number: int, text: str, name: str | None) -> None:
        self._said = True
        self.ended = Ended(name, number, text.strip()[:300]) if name is not None else None


def _name(status: int) -> str | None:
    status = 128 - status if status > 128 else status  # a shell's
    try:
        return signal.Signals(-status).name if status < 0 else None
    except ValueError:
        return None
