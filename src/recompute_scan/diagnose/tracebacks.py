"""Tracebacks out of one process's lines, and the activity that a stack shows.

Tracebacks are read as Python prints them, indented or not, and as IPython and rich print them.
One that has lost its first line counts from its first frame on. Stacks that ``faulthandler`` writes
are read back, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct, field

from recompute_scan.crash import Frame, Raised
from recompute_scan.diagnose.log_lines import HEADER, LOOSE, TYPED, shape
from recompute_scan.frameworks import registry
from recompute_scan.frameworks.detect import LogLine, Where, is_own_backward

_MOST_FRAMES = 400
_MOST_CONTINUED = 60
# A traceback goes on for this many lines without a frame; then it was cut off.
_MOST_BETWEEN = 60
_MOST_UNNAMED = 4

_FRAME = re.compile(
    r'^(?:[`\s]*(?:ERROR|CRITICAL|FATAL):)?(?P<indent>\s*)File "(?P<file>[^"]+)", '
    r"line (?P<line>\d{1,18})"
    r"(?:, in (?P<function>.+))?$"
)
_IPYTHON = re.compile(
    r"^(?:File )?(?P<file>(?:[A-Za-z]:|~)?[/\\][^\s:]*\.py)(?::(?P<line>\d{1,18}),)? "
    r"in (?P<function>[\w.<>]+)\("
)
_CELL = re.compile(
    r"^(?:(?:Cell )?In\s?\[\d+\], (?:in <cell )?line:? (?P<line>\d{1,18})|<ipython-input-\S+> in )"
)
_ARROW = re.compile(r"^-+> (?P<line>\d{1,18}) (?P<source>.*)$")
_RICH = re.compile(
    r"^(?P<file>(?:[A-Za-z]:)?[/\\]\S*\.py):(?P<line>\d{1,18}) in ?(?P<function>[\w<>]*)$"
)
_BORDERS = ("│", "|")
_RICH_NAME = re.compile(r"^[\w<>]+$")
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*\w)(?:: ?(?P<message>.*))?$")
_CHAIN = re.compile(
    r"The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred"
)
# torch raises what a loader's worker, its pinning thread or a replica raised once more, and quotes
# the traceback of that in the message.
_QUOTED = "Original"
_NEW_RECORD = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[ T]|[EWIF]\d{4} \d\d:|=====|\[\d{4}-|\[[EW]\d{3,4} "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)"
)


class Failure(Struct, frozen=True):
    """One uncaught exception, or what looks like one.

    Attributes:
        rank: The rank, ``None`` where the log does not name it.
        line: 1-based number of the line that names the exception.
        errors: The exceptions of the chain, the first raised first.
        lines: For each of them the number of the line that names it.
        places: For each of them the numbers of the lines of its frames.
        process: The process that wrote the lines, as far as the log separates processes.
    """

    rank: int | None
    line: int
    errors: tuple[Raised, ...]
    lines: tuple[int, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    process: str = ""

    def began(self, n: int = 0) -> int:
        """Number of the line where the traceback of an exception begins; 0 under ``run``."""
        if self.places and self.places[n]:
            return self.places[n][0]
        return self.lines[n] if self.lines else 0


class _Open(Struct):
    """The traceback that is being read."""

    headed: bool
    prefix: str = ""
    indent: int = 0
    frames: list[Frame] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    mixed: bool = False
    between: int = 0


class LogStream:
    """The lines of one process; each failure that is complete goes to ``keep``.

    Stacks that end without the name of an exception are in ``unnamed``, the first few.
    """

    def __init__(self, process: str, rank: int | None, keep: Callable[[Failure], None]) -> None:
        self._process = process
        self._rank = rank
        self._keep = keep
        self._open: _Open | None = None
        self._type: str | None = None
        self._message: list[str] = []
        self._named = 0
        self._stamped = False
        self._chain: list[tuple[Raised, int, tuple[int, ...]]] = []
        self._chained = False
        self._quotes = False
        self.unnamed: list[LogLine] = []

    @property
    def busy(self) -> bool:
        """Whether the next line may belong to an exception."""
        return self._open is not None or self._type is not None or self._chained

    def feed(self, number: int, text: str, *, stamped: bool = False) -> None:
        """Take in one line, without the prefixes that name its writer."""
        header = HEADER.match(text)
        if header is not None:
            self._head(header["before"], stamped=stamped)
            return
        if self._type is not None:
            self._continue(number, text, stamped=stamped)
        elif self._open is not None:
            self._inside(number, text)
        elif _CHAIN.search(text) and self._chain:
            self._chained = True
        elif self._frame(number, text, _Open(headed=False)):
            self._stamped = stamped
        elif not self._chained or text.strip():
            self._chained = False
            self._loose(number, text)

    def end(self) -> None:
        """The log ends here, or another exception begins."""
        self._close()
        if self._chain:
            errors, lines, places = zip(*self._chain, strict=True)
            self._keep(Failure(self._rank, lines[-1], errors, lines, places, self._process))
        self._chain, self._chained, self._quotes = [], False, False

    def _head(self, before: str, *, stamped: bool) -> None:
        if before.strip() == _QUOTED and self._type is not None:
            self._close()
            self._open, self._quotes = _Open(headed=True), True
            return
        # Two processes that write into one log begin at once: their frames cannot be separated.
        mixed = self._open is not None and self._type is None and self._open.headed
        if not mixed and not self._chained:
            self.end()
        kept = self._open if mixed else None
        self._open = kept or _Open(headed=True, prefix=shape(before) if before.strip() else "")
        self._open.mixed = mixed
        self._chained = False
        self._stamped = stamped
        if not before.strip() and kept is None:
            self._open.indent = len(before)

    def _inside(self, number: int, text: str) -> None:
        """A line of a traceback before the line that names the exception."""
        open_ = self._open
        assert open_ is not None
        text = self._bare(text)
        if self._frame(number, text, open_):
            return
        body = text[open_.indent :] if not text[: open_.indent].strip() else text
        if body[:1].isspace() or not body or "│" in body or _ARROW.match(body):
            self._source(body)
            return
        raised = _RAISED.match(body.lstrip("*`"))
        if raised is not None and _names_exception(raised["type"], known=bool(open_.frames)):
            self._type, self._named = raised["type"], number
            self._message = [raised["message"] or ""]
            return
        if open_.indent == 0 and open_.frames and open_.frames[-1].source is None:
            self._source(" " + body)
        open_.between += 1
        if open_.between > _MOST_BETWEEN:
            self._close()

    def _bare(self, text: str) -> str:
        """The line without what stood before the traceback's first line as well."""
        prefix = self._open.prefix if self._open is not None else ""
        return text[len(prefix) :] if prefix and shape(text).startswith(prefix) else text

    def _frame(self, number: int, text: str, open_: _Open) -> bool:
        """Whether the line is a frame; then it is kept."""
        frame, indent = _frame_of(text)
        if frame is None:
            return False
        if len(open_.frames) < _MOST_FRAMES:
            open_.frames.append(frame)
            open_.places.append(number)
        if indent is not None:
            open_.indent = max(0, indent - 2)
        open_.between = 0
        self._open = open_
        return True

    def _source(self, body: str) -> None:
        open_ = self._open
        if open_ is None or not open_.frames:
            return
        last, text = open_.frames[-1], body.strip()
        name = (_inside(text) or "").strip()
        if not last.function and _RICH_NAME.match(name):
            open_.frames[-1] = Frame(last.file, last.line, name)
            return
        if (arrow := _ARROW.match(text)) is not None:
            line, source = int(arrow["line"]), arrow["source"].strip()[:300] or None
            open_.frames[-1] = Frame(last.file, line, last.function, source)
        elif text and last.source is None and set(text) - set("^~ ") and "│" not in text:
            open_.frames[-1] = Frame(last.file, last.line, last.function, text[:300])

    def _continue(self, number: int, text: str, *, stamped: bool) -> None:
        """A line after the one that names the exception: more of its message, or the end of it."""
        text = self._bare(text)
        if _CHAIN.search(text):
            self._close()
            self._chained = True
            return
        second = TYPED.match(text)
        if second is not None and not text[:1].isspace():
            frames = self._open
            self.end()
            self._open, self._type, self._named = frames, second["type"], number
            self._message = [second["message"]]
            return
        new = stamped and not self._stamped
        if new or len(self._message) >= _MOST_CONTINUED or _NEW_RECORD.match(text):
            self.end()
        elif _frame_of(text)[0] is not None and not self._in_message(text):
            self.end()
            self._frame(number, text, _Open(headed=False))
        else:
            self._message.append(text)

    def _in_message(self, text: str) -> bool:
        """Is this frame indented, as in a message that quotes one? A title has none before it."""
        return text[:1].isspace() and (self._open is not None or bool(self._message[-1].strip()))

    def _close(self) -> None:
        """The exception that was being read is complete and belongs to the chain."""
        if self._type is not None:
            open_ = self._open or _Open(headed=False)
            message = "\n".join(self._message).strip().rstrip("`*").strip()
            frames = () if open_.mixed else tuple(open_.frames)
            places = () if open_.mixed else tuple(open_.places)
            raised = (Raised(self._type, message, frames), self._named, places)
            at = len(self._chain) - 1 if self._quotes else len(self._chain)
            self._chain.insert(at, raised)  # what is quoted was raised before what quotes it
            self._quotes = False
        elif self._open is not None and len(self._open.frames) > 1:
            where = f"a stack without an exception's name, at {user_place(self._open.frames)}"
            if len(self.unnamed) < _MOST_UNNAMED:
                self.unnamed.append(LogLine(self._open.places[0], where, self._rank))
        self._open, self._type, self._message = None, None, []

    def _loose(self, number: int, text: str) -> None:
        """An exception named without a traceback, as in a pasted message or a log record."""
        match = LOOSE.match(text)
        if match is not None and not match["type"].endswith("Warning"):
            self._chain = []
            self._open = None
            self._type, self._named = match["type"], number
            self._message = [match["message"]]


def _frame_of(text: str) -> tuple[Frame | None, int | None]:
    """The frame that a line shows, and how far Python indented it; ``None`` for other lines."""
    if 'File "' in text and (match := _FRAME.match(text.rstrip())) is not None:
        function = match["function"] or "<module>"
        return Frame(match["file"], int(match["line"]), function), len(match["indent"])
    if ".py" in text:
        inner = _inside(text) if "│" in text else None
        bare = text if inner is None else inner
        if inner is not None and (match := _RICH.match(bare)) is not None:
            return Frame(match["file"], int(match["line"]), match["function"]), None
        if (match := _IPYTHON.match(bare)) is not None:
            name = match["function"].rpartition(".")[2]
            return Frame(match["file"], int(match["line"] or 0), name), None
    if (match := _CELL.match(text)) is not None:
        return Frame("<cell>", int(match["line"] or 0), "<module>"), None
    return None, None


def _inside(text: str) -> str | None:
    """The text between the borders of a line of rich; ``None`` for a line without a border."""
    body = text.strip()
    if body[:1] not in _BORDERS:
        return None
    inner = body[1:].rstrip()
    if inner[-1:] in _BORDERS:
        inner = inner[:-1]
    return inner.removeprefix(" ").rstrip()


def _names_exception(name: str, *, known: bool) -> bool:
    """Whether this stands for a class of exceptions, and is no word of the code."""
    last = name.rpartition(".")[2]
    if not known:
        return "." in name or last.endswith("Error")
    return last[:1].isupper() or "." in name


Activity = Literal[
    "recompute",
    "saving",
    "loading",
    "generation",
    "evaluation",
    "backward",
    "optimizer",
    "wrapping",
]

_INSTALLED = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|^<|/lib/python3\.\d+/|/recompute_scan/"
)
_RECOMPUTE = re.compile(
    r"torch/utils/checkpoint\.py:(?:recompute_fn|unpack_hook\w*|check_recomputed\w*)$"
    rf"|{registry.either('backward')}"
)
# Of an inference engine, what runs the model or makes room for its cache; it loads weights too.
_ENGINE = re.compile(
    r"(?:^|/)(?:vllm|sglang|lmdeploy)/\S{0,300}:(?:_?(?:execute_(?:model|dummy|mm)|forward|generate|sample|dummy_run|capture"
    r"|profile_run|determine_available_memory|warm_?up|run_model|step)\w*|\w*kv_cache\w*)$"
    r"|/generation/utils\.py:"
)
_GENERATES = re.compile(r":_?generate$")
_EVALUATION = re.compile(
    r":_?(?:run_)?(?:evaluate|evaluation|validate|validation|estimate_loss)$"
    r"|:_?(?:\w+_)?(?:val|valid|validate|validation|eval|evaluate|evaluation|prediction|test)"
    r"_(?:one_)?(?:epoch|step|loop)$|:(?:\w+_)?(?:val|validate|eval|evaluate)_model$"
    r"|/trainer\.py:predict$"
)
_BACKWARD = re.compile(
    r"torch/_tensor\.py:backward$|torch/autograd/(?!grad_mode)\w+\.py:\w*(?:backward|grad)$"
)
_OPTIMIZER = re.compile(
    r"torch/optim/\w{1,80}\.py:(?!\w{0,80}(?:cast|process_value|load)\w*$)"
    r"|(?:^|/)\w{0,80}(?:adam|optim|sgd|lion|muon|adafactor)\w{0,80}\.py:step$"
    rf"|{registry.either('stepping')}"
)
_WRAPPING = re.compile(r"fsdp/(?:_init_utils|wrap)\.py:|fsdp/\w+\.py:_init_(?:flat_)?param\w*$")
_FORWARD = re.compile(r"torch/nn/modules/module\.py:_?\w*call\w*$|:forward$")

_SAVES = {"save", "saves", "saving"}
_NO_SAVE = {"maybe", "load", "restore", "resume", "evaluate", "eval", "validate", "log", "should"}
_NO_SAVE |= {"backward", "forward", "hooks"}
_LOADS = {"load", "loads", "reload", "restore", "resume", "pretrained"}
_NO_LOAD = {"data", "dataset", "datasets", "batch", "image", "images", "sample", "item", "example"}
_STATE = re.compile(r"^(?:\w+_)?state_dict$")
# Functions that gather or write a state in a save; a function's name alone is no sign of it.
_GATHERS = re.compile(
    r":(?:\w+_)?state_dict\w*$|_state_dict_utils\.py:|/_flat_param\.py:|/_optim_utils\.py:"
    r"|:_?(?:summon|unshard|gather|consolidate|zero_to_fp32)\w*$|torch/serialization\.py:"
    r"|/safetensors/|torch/distributed/checkpoint/"
)
_SAVE_CALL = re.compile(r"\bsave\w{0,80}\(")

_WORDS: dict[Activity, str] = {
    "recompute": "while a checkpointed region was recomputed",
    "saving": "while saving",
    "loading": "while loading",
    "generation": "while generating",
    "evaluation": "while evaluating",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "wrapping": "while parameters were wrapped",
}


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside installed packages; ``None`` where there is none."""
    return next(
        (one for one in reversed(frames) if not _INSTALLED.search(one.file.replace("\\", "/"))),
        None,
    )


def user_place(frames: Sequence[Frame]) -> str | None:
    """``file:line`` of the user's own innermost frame, else of the innermost of all."""
    frame = user_frame(frames) or (frames[-1] if frames else None)
    return frame.place if frame is not None else None


def activity(frames: Sequence[Frame]) -> tuple[Activity, int] | None:
    """The activity, and the index of the frame that shows it; ``None`` where no frame does.

    The innermost such frame counts: a function that evaluates, called by one that saves and
    evaluates, is evaluating. Where a model is called further in, neither saving nor loading
    goes on, whatever the functions around it are named.
    """
    forward = gathers = False
    for index in range(len(frames) - 1, -1, -1):
        inner = frames[index + 1] if index + 1 < len(frames) else None
        found = _of_frame(frames[index], inner, forward=forward, gathers=gathers)
        where = frames[index].site
        if forward and found in (None, "backward") and is_own_backward(frames, index):
            found = "recompute"  # it runs a module
        if found is not None:
            return found, index
        forward = forward or _FORWARD.search(where) is not None
        gathers = gathers or _GATHERS.search(where) is not None
    return None


def doing(*wanted: Activity) -> Where:
    """The frame that shows one of these to have been going on."""

    def found(frames: Sequence[Frame]) -> int | None:
        what = activity(frames)
        return what[1] if what is not None and what[0] in wanted else None

    return found


def evaluates(frames: Sequence[Frame]) -> bool:
    """Is any of these the frame of a function that evaluates, whatever it calls?"""
    return any(_EVALUATION.search(frame.site) for frame in frames)


def phase(frames: Sequence[Frame]) -> str | None:
    """The activity in words; ``None`` where no frame shows one."""
    found = activity(frames)
    if found is not None:
        return _WORDS[found[0]]
    return "in the forward pass" if any(_FORWARD.search(one.site) for one in frames) else None


def _of_frame(
    frame: Frame, inner: Frame | None, *, forward: bool, gathers: bool
) -> Activity | None:
    where = frame.site
    if _RECOMPUTE.search(where):
        return "recompute"
    if _ENGINE.search(where) or (forward and _GENERATES.search(where)):
        return "generation"
    if _EVALUATION.search(where):
        return "evaluation"
    if not forward:
        library = _INSTALLED.search(frame.file.replace("\\", "/")) is not None
        if (library or gathers) and _saves(frame, inner):
            return "saving"
        if _loads(frame):
            return "loading"
    if _OPTIMIZER.search(where):
        return "optimizer"
    if _BACKWARD.search(where):
        return "backward"
    return "wrapping" if _WRAPPING.search(where) else None


def _saves(frame: Frame, inner: Frame | None) -> bool:
    words = set(frame.function.lower().split("_"))
    if words & _SAVES and not words & _NO_SAVE and frame.function != "save_on_cpu":
        return True
    # torch.save(model.state_dict(), path): the state is gathered before save is called.
    gathers = inner is not None and _STATE.search(inner.function) is not None
    return gathers and _SAVE_CALL.search(frame.source or "") is not None


def _loads(frame: Frame) -> bool:
    words = set(frame.function.lower().split("_"))
    return bool(words & _LOADS) and not words & _NO_LOAD


_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
_WATCHDOG = "recompute_scan/record/watchdog.py"
_PLACES_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d{1,18}) in (?P<function>.+)')


def main_stack(text: str) -> tuple[Frame, ...]:
    """Where the main thread stood, outermost frame first; empty where the text holds no stack.

    The main thread is the one that got the signal (``Current thread``), else the oldest, which
    faulthandler lists last. Of several dumps the last counts.
    """
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head is not None:
            threads.append((head["current"] == "Current thread", []))
        elif threads and (match := _PLACES_FRAME.match(line)) is not None:
            threads[-1][1].append(Frame(match["file"], int(match["line"]), match["function"]))
    # The watchdog's own dump has the watchdog's thread as the current one.
    threads = [one for one in threads if one[1] and not one[1][0].file.endswith(_WATCHDOG)]
    current = [frames for is_current, frames in threads if is_current]
    chosen = current or [frames for _, frames in threads]
    return tuple(reversed(chosen[-1])) if chosen else ()
