"""Signatures of known failures, and torch's message about a recompute that differs.

A signature holds the pattern of a failure, its cause and its fix.
``tests/diagnose/test_gradients.py`` measures on models how each fix changes gradients.

The message is from ``torch.utils.checkpoint`` (torch 2.1 to 2.13): for each tensor that differs, a
line for the saved one and a line for the recomputed one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct
from msgspec.structs import force_setattr

from recompute_scan.crash import Frame, Raised

Checked = Literal["reproduced", "message"]
# The index of the frame that shows something; None where no frame does.
Where = Callable[[Sequence[Frame]], int | None]
Fits = Callable[[Raised], bool]

# For failures that no message shows.
NOTHING = re.compile(r"(?!)")
# A warning that goes with an error stands this close before its traceback.
_NEAR = 60

# The name of each code's finding.
NAMES = {
    "RS101": "checkpoint-metadata-mismatch",
    "RS102": "checkpoint-tensor-count",
    "RS103": "checkpoint-unpacked-twice",
    "RS104": "checkpoint-without-gradient",
    "RS105": "reentrant-keyword-arguments",
    "RS106": "reentrant-under-autograd-grad",
    "RS107": "frozen-checkpoint",
    "RS108": "selective-checkpoint-misuse",
    "RS109": "device-started-in-checkpoint",
    "RS110": "cache-grown-in-recompute",
    "RS111": "ddp-marked-ready-twice",
    "RS112": "ddp-unused-parameters",
    "RS113": "mixed-tensor-and-dtensor",
    "RS114": "fsdp-state-broken",
    "RS115": "fsdp-mixed-requires-grad",
    "RS116": "fsdp-mixed-dtype",
    "RS117": "fsdp-weight-not-gathered",
    "RS118": "fsdp-needs-device",
    "RS119": "both-checkpoint-switches",
    "RS120": "out-of-memory",
    "RS121": "early-stop-assertion",
    "RS122": "checkpoint-under-cuda-graph",
    "RS123": "offload-keyword-removed",
    "RS124": "variant-not-chosen",
    "RS125": "second-checkpoint-warned",
    "RS126": "zero-reduced-twice",
    "RS127": "pinned-memory-exhausted",
    "RS128": "inference-cache-memory",
    "RS129": "host-memory-exhausted",
    "RS130": "reentrant-limit",
    "RS131": "checkpointing-not-switched-on",
    "RS132": "checkpoint-under-transform",
    "RS133": "fp8-state-lost",
    "RS134": "offloading-out-of-order",
    "RS135": "checkpoint-input-changed",
    "RS136": "generation-without-cache",
    "RS201": "weights-only-sharded-save",
    "RS202": "optimizer-state-dtype-mismatch",
    "RS203": "sharded-padding-assert",
    "RS204": "save-hang",
    "RS205": "optimizer-lacks-parameter",
    "RS206": "checkpoint-folder-not-empty",
    "RS207": "out-of-memory-while-saving",
    "RS209": "collective-timeout",
    "RS210": "diverged-ranks",
    "RS211": "no-progress",
    "RS212": "process-killed",
    "RS213": "native-crash",
    "RS214": "message-in-checkpoint",
}


class LogLine(Struct, frozen=True):
    """A line of the log that may go with an exception.

    Attributes:
        number: Its 1-based number; 0 for a line that ``run`` noted.
        text: The line.
        rank: The rank that wrote it; ``None`` where the log does not say.
    """

    number: int
    text: str
    rank: int | None = None


class Match(Struct, frozen=True):
    """The parts of an exception that show the failure: a frame of its stack, a line before it."""

    frame: int | None = None
    line: LogLine | None = None


def some(pattern: str) -> Where:
    """Finds the innermost frame with a ``file:function`` that the pattern fits."""
    fits = re.compile(pattern).search
    return lambda frames: next(
        (n for n in range(len(frames) - 1, -1, -1) if fits(frames[n].site)), None
    )


# The caller of a forward() or backward() that is written in Python.
_APPLIED = re.compile(r"torch/autograd/function\.py:apply$")


def is_applied(frames: Sequence[Frame], index: int) -> bool:
    """Is this frame a method of an autograd function that is written in Python?"""
    return index > 0 and _APPLIED.search(frames[index - 1].site) is not None


def is_own_backward(frames: Sequence[Frame], index: int) -> bool:
    """Is it such a function's backward()?"""
    return frames[index].function == "backward" and is_applied(frames, index)


def innermost(pattern: str) -> Where:
    """Finds the innermost frame of all, where the pattern fits its ``file:function``."""
    fits = re.compile(pattern).search
    return lambda frames: len(frames) - 1 if fits(frames[-1].site) else None


class Signature(Struct, frozen=True, kw_only=True):
    """One known failure: how to recognize it, its cause, its fix.

    A code has several signatures where one message has several causes, each with its
    ``cause_name``. Titles, causes and fixes may be written over several lines.

    Attributes:
        code: Code of the finding, which never changes its meaning.
        cause_name: Which cause of this finding.
        message: Found in the exception's message, or in the line of a notice; by default a pattern
            that fits nothing, for failures that only ranks or weights show.
        title: The event, one sentence.
        cause: Why, one or two sentences.
        fix: The change to make.
        gradients: What that change can do to gradients, and where it cannot; empty where it
            touches no checkpoint's variant, random state, check or buffers.
        versions: Where it occurs and where it is fixed.
        sources: Addresses that prove it; one without a scheme is on GitHub.
        error: The whole of the exception's class name, without its module.
        where: Finds the frame of the failing stack that must show it.
        frameless: Whether it fits an exception without frames all the same.
        fits: A condition that a pattern cannot say.
        nearby: Found in a line shortly before, or among the warnings of the run; required.
        notice: Whether a line of the log shows it without any exception, such as a warning.
        unsure: Whether its confidence is low in any case.
        several: Whether its cause only lists possibilities: its confidence is medium at most.
        sharded: The frame that shows a model to be sharded, for a failure that is only sure there.
        more: More for the finding's page, as Markdown.
        keep: The setting that stays.
        remove: The setting that goes.
        checked: ``reproduced`` by a script on CPU, or known by its message only.
        severity: Of the finding.
        name: Of the finding; taken from ``NAMES`` where the code is there.
    """

    code: str
    cause_name: str
    message: re.Pattern[str] = NOTHING
    title: str
    cause: str
    fix: str
    versions: str = "Not tied to a version."
    sources: tuple[str, ...]
    error: str = r"\w*(?:Error|Exception)"
    where: Where | None = None
    frameless: bool = False
    fits: Fits | None = None
    nearby: re.Pattern[str] | None = None
    notice: bool = False
    unsure: bool = False
    several: bool = False
    sharded: Where | None = None
    gradients: str = ""
    more: str = ""
    keep: str = ""
    remove: str = ""
    checked: Checked = "message"
    severity: Literal["error", "warning", "info"] = "error"
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("title", "cause", "fix", "versions"):
            force_setattr(self, name, " ".join(getattr(self, name).split()))
        force_setattr(self, "name", NAMES.get(self.code, self.name))
        links = (at if "://" in at else f"https://github.com/{at}" for at in self.sources)
        force_setattr(self, "sources", tuple(links))

    def match(
        self,
        raised: Raised,
        nearby: Sequence[LogLine] = (),
        began: int = 0,
        rank: int | None = None,
    ) -> Match | None:
        """The parts that show this exception to be that failure; ``None`` where it is not.

        Args:
            raised: The exception, with the frames of its traceback.
            nearby: Other lines that may matter, such as warnings.
            began: Number of the line where its traceback begins; 0 under ``run``.
            rank: The rank that raised it; ``None`` where the log does not say.
        """
        # A terminal may have broken the message at a width, and a person between words.
        texts = (raised.message.replace("\n", by) for by in ("\n", "", " "))
        if not _is_called(self.error, raised.name) or not any(map(self.message.search, texts)):
            return None
        frame = line = None
        if self.where is not None and (raised.frames or not self.frameless):
            frame = self.where(raised.frames) if raised.frames else None
            if frame is None:
                return None
        if self.nearby is not None:
            near = (
                one
                for one in nearby
                if (not one.number or began - _NEAR <= one.number <= began)
                and one.rank in (rank, None)
            )
            line = next((one for one in near if self.nearby.search(one.text)), None)
            if line is None:
                return None
        return Match(frame, line) if self.fits is None or self.fits(raised) else None


@lru_cache(4096)  # a log repeats few names of exceptions any number of times
def _is_called(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


_META = (
    r"metadata: {1,40}\{'shape': torch\.Size\(\[((?:\d{1,18}(?:, {0,4}|(?=\]))){0,64})\]\), "
    r"'dtype': ([\w.]{1,40})(?:, 'device': device\(type='(\w+)')?"
)
# The two stand close together; without a limit, the time for a message grows with its square.
_PAIR = re.compile(rf"saved {_META}.{{0,400}}?recomputed {_META}", re.DOTALL)
MISMATCH = re.compile(r"have different metadata than during the forward pass")
_MOST_SHOWN = 3


class Mismatch(Struct, frozen=True):
    """One tensor: shape, dtype and device (empty where unsaid) as saved, and as recomputed."""

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    saved_dtype: str
    recomputed_dtype: str
    saved_device: str = ""
    recomputed_device: str = ""

    @property
    def same_shape(self) -> bool:
        """Whether only dtype or device differ."""
        return self.saved == self.recomputed

    @property
    def same_dtype(self) -> bool:
        """Whether the recompute made the same dtype."""
        return self.saved_dtype == self.recomputed_dtype

    def changed(self) -> list[int]:
        """The dimensions with another length; all of both where their numbers differ."""
        if len(self.saved) != len(self.recomputed):
            return list(range(len(self.saved) + len(self.recomputed)))
        return [n for n, old in enumerate(self.saved) if old != self.recomputed[n]]


def mismatches(message: str) -> list[Mismatch]:
    """The tensors that an error names, in its order."""
    return [
        Mismatch(
            *(_shape(match[1]), _shape(match[4]), match[2], match[5]),
            *(match[3] or "", match[6] or ""),
        )
        for match in _PAIR.finditer(message)
    ]


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def described(message: str) -> str:
    """The shapes that differ, in one sentence; empty where the message names none."""
    pairs = {
        f"{list(one.saved)} was saved, and {list(one.recomputed)} recomputed": None
        for one in mismatches(message)
        if not one.same_shape
    }
    shown = "; ".join(list(pairs)[:_MOST_SHOWN])
    more = f"; and {len(pairs) - _MOST_SHOWN} more" if len(pairs) > _MOST_SHOWN else ""
    return f"The shapes differ: {shown}{more}" if pairs else ""


def all_tensors(condition: Callable[[Mismatch], bool]) -> Fits:
    """Does it hold for every tensor that the error names, and does it name one?"""
    return lambda raised: bool(found := mismatches(raised.message)) and all(map(condition, found))


def any_tensor(condition: Callable[[Mismatch], bool]) -> Fits:
    """Does it hold for some tensor that the error names?"""
    return lambda raised: any(map(condition, mismatches(raised.message)))


# A tensor was not empty when saved and is in the recompute: its parameter was given away.
came_back_empty = any_tensor(lambda one: one.recomputed == (0,) and one.saved not in ((0,), ()))
