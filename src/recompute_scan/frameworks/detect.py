"""Frameworks recognized from call signatures and from package metadata.

What a known failure looks like, what is known about it, and what its fix does to gradients.

``tests/diagnose/test_gradients.py`` measures each on models of its own.

What torch says when a recompute saved tensors of another shape or dtype than the original run.

The text is that of ``torch.utils.checkpoint`` (torch 2.1 to 2.13): a line for what was saved and
one for what the recompute made, for each tensor that differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
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
        if not _is_called(self.error, raised.name) or not self._says(raised.message):
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


@lru_cache(4096)  # a log repeats few names of exceptions any number of times
def _is_called(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


_META = (
    r"metadata: {1,40}\{'shape': torch\.Size\(\[((?:\d{1,18}(?:, {0,4}|(?=\]))){0,64})\]\), "
    r"'dtype': ([\w.]{1,40})(?:, 'device': device\(type='(\w+)')?"
)
# The two stand close together; without a limit, the time for a message grows with its square.
_PAIR = re.compile(rf"saved {_META}.{{0,400}}?recomputed {_META}", re.DOTALL)
# What attention says of a mask that does not fit the keys: added to scores, checked by
# transformers before that, or expanded by torch's own attention.
MASK = re.compile(
    r"^The size of tensor a \((?P<a>\d{1,18})\) must match the size of tensor b \((?P<b>\d{1,18})\)"
    r"|^Attention mask should be of size \([\d, ]*?(?P<wanted>\d{1,18})\), but is "
    r"(?:torch\.Size\(\[)?[\d, (]*?(?P<given>\d{1,18})[\])]"
    r"|^The expanded size of the tensor \((?P<target>\d{1,18})\) must match the existing size "
    r"\((?P<existing>\d{1,18})\)"
)
_KEY_DIMENSIONS = 4
_SEQUENCE_DIMENSIONS = 3
_TABLE_DIMENSIONS = 2
# Rows that another routing of tokens moves at most, between these experts and to other ranks.
_FEW_ROWS, _FEW_ROWS_AWAY = 0.2, 0.01


MISMATCH = re.compile(r"have different metadata than during the forward pass")


class Mismatch(Struct, frozen=True):
    """One tensor: shape, dtype and device (empty where unsaid) as saved, and as recomputed."""

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    saved_dtype: str
    recomputed_dtype: str
    saved_device: str = ""
    recomputed_device: str = ""


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


def grew_twofold(raised: Raised) -> bool:
    """Keys and values are twice as long in the recompute, and nothing else is.

    Every tensor differs in one dimension, which doubled and was as long in all: the sequence.
    Either some tensor is a square of scores whose keys alone doubled, or all have the four
    dimensions of keys and values, and neither the batch nor the width changed.
    """
    found = mismatches(raised.message)
    changes = [_change(one, 2.0) for one in found]
    if not found or any(change is None for change in changes):
        return False
    lengths = {
        one.saved[change] for one, change in zip(found, changes, strict=True) if change is not None
    }
    if len(lengths) > 1:
        return False
    scores = any(
        one.saved[-1] == one.saved[-2] and change == len(one.saved) - 1
        for one, change in zip(found, changes, strict=True)
        if len(one.saved) > 2
    )
    return scores or all(
        len(one.saved) == _KEY_DIMENSIONS and change not in (0, None)
        for one, change in zip(found, changes, strict=True)
    )


def _change(one: Mismatch, ratio: float) -> int | None:
    """The one dimension that became this many times as long; ``None`` where more changed."""
    if len(one.saved) != len(one.recomputed) or one.saved_dtype != one.recomputed_dtype:
        return None
    pairs = enumerate(zip(one.saved, one.recomputed, strict=True))
    changed = [(n, old, new) for n, (old, new) in pairs if old != new]
    if len(changed) != 1 or changed[0][1] * ratio != changed[0][2]:
        return None
    return changed[0][0]


def came_back_empty(raised: Raised) -> bool:
    """A tensor was not empty when saved and is in the recompute: its parameter was given away."""
    return any(
        one.recomputed == (0,) and one.saved not in ((0,), ()) for one in mismatches(raised.message)
    )


def shrank_evenly(raised: Raised) -> bool:
    """Of every tensor the sequence is shorter in the recompute, by the same whole number of times.

    The sequence is the longest dimension but the width, of a tensor that has a batch before it.
    """
    found = mismatches(raised.message)
    ratios = {_shortened(one) for one in found}
    return len(ratios) == 1 and None not in ratios


def _shortened(one: Mismatch) -> int | None:
    if len(one.saved) != len(one.recomputed) or len(one.saved) < _SEQUENCE_DIMENSIONS:
        return None
    inner = one.saved[1:-1]
    at = 1 + inner.index(max(inner))
    old, new = one.saved[at], one.recomputed[at]
    rest = one.saved[:at] + one.saved[at + 1 :] == one.recomputed[:at] + one.recomputed[at + 1 :]
    whole = new > 1 and old > new and old % new == 0 and one.saved_dtype == one.recomputed_dtype
    return old // new if rest and whole else None


def only_dtypes_differ(raised: Raised) -> bool:
    """Shapes are equal, dtypes are not."""
    found = mismatches(raised.message)
    return bool(found) and all(
        one.saved == one.recomputed and one.saved_dtype != one.recomputed_dtype and _floats(one)
        for one in found
    )


def only_devices_differ(raised: Raised) -> bool:
    """Shapes and dtypes are equal, devices are not.

    A random state alone does not count: attention saves its own, in whole numbers.
    """
    found = mismatches(raised.message)
    return (
        bool(found)
        and all(
            one.saved == one.recomputed
            and one.saved_dtype == one.recomputed_dtype
            and one.saved_device != one.recomputed_device
            for one in found
        )
        and any("int" not in one.saved_dtype for one in found)
    )


def on_meta(raised: Raised) -> bool:
    """A tensor that had values when it was saved is on ``meta`` in the recompute."""
    return any(
        one.recomputed_device == "meta" and one.saved_device not in ("meta", "")
        for one in mismatches(raised.message)
    )


def random_state_differs(raised: Raised) -> bool:
    """A random state is one of another attention kernel's.

    Fused attention saves its seed and offset: flash attention as ``uint64``, the seed as two
    numbers; cuDNN's and the memory-efficient kernel as one ``int64`` each.
    """
    return any(
        ("uint64" in one.saved_dtype) != ("uint64" in one.recomputed_dtype)
        and one.saved in ((), (2,))
        and one.recomputed in ((), (2,))
        for one in mismatches(raised.message)
    )


def rows_moved(raised: Raised) -> bool:
    """Only the rows of tables differ, by a few: tokens went to other experts.

    What one expert gets, another goes without: some tables grow and some shrink. Where all grow, or
    all shrink, the others are on other ranks, and a few rows in a hundred are too many.
    """
    found = mismatches(raised.message)
    both = len({one.recomputed[:1] > one.saved[:1] for one in found}) > 1
    share = _FEW_ROWS if both else _FEW_ROWS_AWAY
    return bool(found) and all(
        0 < len(one.saved) == len(one.recomputed) <= _TABLE_DIMENSIONS
        and one.saved[1:] == one.recomputed[1:]
        and 0 < abs(one.saved[0] - one.recomputed[0]) <= max(1, share * one.saved[0])
        for one in found
    )


def _floats(one: Mismatch) -> bool:
    return all("float" in dtype for dtype in (one.saved_dtype, one.recomputed_dtype))


def keys_twice_the_mask(message: str) -> bool:
    """Is the attention mask half as long as the keys, in any of the forms of :data:`MASK`?

    transformers 4.40 makes the mask one longer than the sequence: 26 for 25, where the recompute's
    keys are 50.
    """
    match = MASK.search(message)
    if match is None:
        return False
    keys, mask = next(
        (int(match[keys]), int(match[mask]))
        for keys, mask in (("a", "b"), ("wanted", "given"), ("target", "existing"))
        if match[keys] is not None
    )
    return mask > 1 and keys in (2 * mask, 2 * mask - 1, 2 * mask - 2)
