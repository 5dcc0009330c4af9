"""What a known failure looks like, and what is known about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from recompute_scan.crash import Raised

Checked = Literal["reproduced", "message"]


def always(_: Raised) -> bool:
    """No further condition."""
    return True


@dataclass(frozen=True)
class Signature:
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
        versions: Where it occurs and where it is fixed.
        sources: Addresses of what this rests on.
        error: The whole of the exception's class name, without its module.
        frames: Found in ``file:function`` of some frame, where frames are known.
        needs_frames: Whether it is never recognised without frames.
        fits: A condition that a pattern cannot say.
        beside: Found in another line of the log, or among what the run saw, or it does not fit.
        notice: Whether a line of the log shows it without any exception, such as a warning.
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
    frames: re.Pattern[str] | None = None
    needs_frames: bool = False
    fits: Callable[[Raised], bool] = always
    beside: re.Pattern[str] | None = None
    notice: bool = False
    more: str = ""
    keep: str = ""
    remove: str = ""
    checked: Checked = "message"
    severity: Literal["error", "warning", "info"] = "error"

    def matches(self, raised: Raised, beside: tuple[str, ...] = ()) -> bool:
        """Is this exception that failure?

        Args:
            raised: The exception.
            beside: Other lines of the log that may matter, such as warnings.
        """
        if not re.fullmatch(self.error, raised.name) or not self.message.search(raised.message):
            return False
        if self.needs_frames and not raised.frames:
            return False
        if self.frames is not None and raised.frames:
            places = (f"{frame.file}:{frame.function}" for frame in raised.frames)
            if not any(self.frames.search(place) for place in places):
                return False
        if self.beside is not None and not any(self.beside.search(line) for line in beside):
            return False
        return self.fits(raised)
