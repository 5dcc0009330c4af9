"""What a known failure looks like, what is known about it, and what its fix does to gradients.

``tests/diagnose/test_gradients.py`` measures each on models of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from recompute_scan.crash import Frame, Raised

Checked = Literal["reproduced", "message"]
# The index of the frame that shows something; None where no frame does.
Where = Callable[[Sequence[Frame]], int | None]

# A warning that goes with an error stands this close before its traceback.
_NEAR = 60


class Beside(Struct, frozen=True):
    """A line of the log that may go with an exception.

    Attributes:
        number: Its 1-based number; 0 for what a run of our own noted.
        text: The line.
        rank: Whose it is; ``None`` where the log does not say.
    """

    number: int
    text: str
    rank: int | None = None


class Match(Struct, frozen=True):
    """What of an exception shows the failure: a frame of its stack, a line before it."""

    frame: int | None = None
    beside: Beside | None = None


def always(_: Raised) -> bool:
    """No further condition."""
    return True


def some(pattern: str) -> Where:
    """The innermost frame whose ``file:function`` the pattern finds."""
    compiled = re.compile(pattern)

    def found(frames: Sequence[Frame]) -> int | None:
        hits = (n for n in range(len(frames) - 1, -1, -1) if compiled.search(frames[n].site))
        return next(hits, None)

    return found


def innermost(pattern: str) -> Where:
    """The innermost frame of all, where the pattern finds its ``file:function``."""
    compiled = re.compile(pattern)

    def found(frames: Sequence[Frame]) -> int | None:
        return len(frames) - 1 if compiled.search(frames[-1].site) else None

    return found


class Signature(Struct, frozen=True):
    """One known failure: how to recognise it, its cause, its fix.

    A code has several signatures where one message has several causes; ``cause_name`` tells
    them apart.

    Attributes:
        code: Code of the finding, which never changes its meaning.
        name: Name of the finding.
        cause_name: Which cause of this finding.
        message: Found in the exception's message, or in the line of a notice.
        title: What happened, one sentence.
        cause: Why, one or two sentences.
        fix: What to change.
        gradients: What that change can do to gradients, and where it cannot; empty where it
            touches no checkpoint's variant, random state, check or buffers.
        versions: Where it occurs and where it is fixed.
        sources: Addresses of what this rests on.
        error: The whole of the exception's class name, without its module.
        where: The frame of the failing stack that must show it, where frames are known.
        needs_frames: Whether it is never recognised without frames.
        fits: A condition that a pattern cannot say.
        beside: Found in a line shortly before, or among what the run saw, or it does not fit.
        notice: Whether a line of the log shows it without any exception, such as a warning.
        unsure: Whether it is said with low confidence in any case.
        sharded: The frame that shows a model to be sharded, for what is sure of sharded ones only.
        more: More for the finding's page, as Markdown.
        keep: What stays.
        remove: What goes.
        checked: ``reproduced`` by a script on CPU, or known by its message only.
        severity: Of the finding.
    """

    code: str
    name: str
    cause_name: str
    message: re.Pattern[str]
    title: str
    cause: str
    fix: str
    versions: str
    sources: tuple[str, ...]
    error: str = r"\w*(?:Error|Exception)"
    where: Where | None = None
    needs_frames: bool = False
    fits: Callable[[Raised], bool] = always
    beside: re.Pattern[str] | None = None
    notice: bool = False
    unsure: bool = False
    sharded: Where | None = None
    gradients: str = ""
    more: str = ""
    keep: str = ""
    remove: str = ""
    checked: Checked = "message"
    severity: Literal["error", "warning", "info"] = "error"

    def match(
        self,
        raised: Raised,
        beside: Sequence[Beside] = (),
        began: int = 0,
        rank: int | None = None,
    ) -> Match | None:
        """What shows this exception to be that failure; ``None`` where it is not.

        Args:
            raised: The exception, with the frames of its own traceback.
            beside: Other lines that may matter, such as warnings.
            began: Number of the line where its traceback begins; 0 in a run of our own.
            rank: Whose it is; ``None`` where the log does not say.
        """
        if not re.fullmatch(self.error, raised.name) or not self._says(raised.message):
            return None
        if self.needs_frames and not raised.frames:
            return None
        frame = None
        if self.where is not None and raised.frames:
            frame = self.where(raised.frames)
            if frame is None:
                return None
        line = None
        if self.beside is not None:
            line = self._line(beside, began, rank)
            if line is None:
                return None
        return Match(frame, line) if self.fits(raised) else None

    def _says(self, message: str) -> bool:
        """Is it that message, also where a terminal has broken its lines at a width?"""
        return any(map(self.message.search, (message, message.replace("\n", ""))))

    def _line(self, beside: Sequence[Beside], began: int, rank: int | None) -> Beside | None:
        assert self.beside is not None
        for line in beside:
            near = not line.number or began - _NEAR <= line.number <= began
            if near and line.rank in (rank, None) and self.beside.search(line.text):
                return line
        return None
