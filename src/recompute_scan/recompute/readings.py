"""Sequences that were read wrongly at first, by what all of them say together.

Where layers are equal, a sequence alone can be one recompute of two layers or two recomputes of
one. Four facts tell, once every sequence has been read:

* sequences of the same operators were made by checkpoints of the same kind. What is the first
  of its layers can be read in one way alone, and the others are read likewise; so is what ends
  like it, where a further checkpoint around all layers put its own recompute before;
* checkpoints around one operator are recomputed from the outermost to the innermost, so none of a
  sequence's recomputes begins before the one that ran before it;
* an operator whose results a recompute did not keep lies in a further checkpoint within, which has
  to recompute it again later;
* checkpointed calls nest or are disjoint, so recomputes that overlap in part cannot both be right.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute.runs import SHORT_RUN
from recompute_scan.trace.columns import Int64


class Ending(Struct, frozen=True):
    """How far below its expected end a sequence may reach with its last ``count`` operators.

    ``longer``: so may any that ends with these operators.
    """

    count: int
    height: int
    longer: bool = False


class Endings(Struct, frozen=True):
    """What is known of sequences of certain operators (bytes of their codes)."""

    known: dict[bytes, Ending]

    def of(self, operators: Int64) -> Ending | None:
        """What is known of this sequence, or of the longest ending of it."""
        text = operators.tobytes() if self.known else b""
        if text in self.known:
            return self.known[text]
        ends = [end for end, what in self.known.items() if what.longer and text.endswith(end)]
        return self.known[max(ends, key=len)] if ends else None


class Reading(Struct, frozen=True):
    """What one sequence was taken for.

    Attributes:
        operators: Codes of its operators.
        expected: Place in the forward pass where its recomputes are expected to end.
        recomputes: First and last place of each, in order of time.
        asked: A node asked for a saved tensor; else it is a checkpoint function's own.
        forgotten: The last place whose results were not kept, and that is not recomputed again.
    """

    operators: Int64
    expected: int
    recomputes: tuple[tuple[int, int], ...]
    asked: bool
    forgotten: int | None

    @property
    def key(self) -> bytes:
        """Equal for equal operators."""
        return self.operators.tobytes()

    @property
    def whole(self) -> Ending:
        """That all of such a sequence may reach as far down as this one."""
        return Ending(len(self.operators), self.expected - min(self.begins))

    @property
    def begins(self) -> list[int]:
        """First place of each recompute, in order of time."""
        return [first for first, _ in self.recomputes]

    @property
    def in_order(self) -> bool:
        """Does none begin before the one that ran before it?"""
        return self.begins == sorted(self.begins)


def correct(endings: Endings, readings: list[Reading]) -> Endings:
    """What else is known, now that all sequences have been read.

    The first fact that is violated counts alone: what it sets right can be what violates others.
    """
    for find in (_by_likeness, _by_order, _by_keeping, _by_crossings):
        found = find(readings)
        if find is _by_likeness:
            found |= {k: e for k, e in _by_longer(readings).items() if k not in endings.known}
        new = {key: ending for key, ending in found.items() if endings.known.get(key) != ending}
        if new:
            return Endings(endings.known | new)
    return endings


def _surest(readings: Iterable[Reading]) -> dict[bytes, Reading]:
    """Of equal sequences the one that was read as most recomputes."""
    surest: dict[bytes, Reading] = {}
    for reading in readings:
        known = surest.get(reading.key)
        if reading.in_order and (known is None or len(reading.recomputes) > len(known.recomputes)):
            surest[reading.key] = reading
    return surest


def _by_likeness(readings: list[Reading]) -> dict[bytes, Ending]:
    surest = _surest(readings)
    return {
        reading.key: surest[reading.key].whole
        for reading in readings
        if reading.key in surest and len(reading.recomputes) < len(surest[reading.key].recomputes)
    }


def _by_longer(readings: list[Reading]) -> dict[bytes, Ending]:
    keys = {reading.key for reading in readings}
    return {
        key: replace(reading.whole, longer=True)
        for key, reading in _surest(readings).items()
        if len(reading.recomputes) > 1
        and any(len(other) > len(key) and other.endswith(key) for other in keys)
    }


def _by_order(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    endings = {}
    for reading in readings:
        count = 0
        for at in reversed(range(1, len(reading.recomputes))):
            first, last = reading.recomputes[at]
            floor = max(reading.begins[:at])
            if first < floor:
                count += last - floor + 1
                endings[reading.key] = Ending(count, reading.expected - floor)
                break
            count += last - first + 1
    return endings


def _by_keeping(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    # What has no gradient is kept as it is: the first block's input tells nothing where others of
    # its operators keep theirs (`_recomputation_hook`).
    readings = list(readings)
    kept = {reading.key for reading in readings if reading.asked and reading.forgotten is None}
    return {
        reading.key: Ending(len(reading.operators), reading.expected - reading.forgotten - 1)
        for reading in readings
        if reading.asked and reading.forgotten is not None and reading.forgotten < reading.expected
        if reading.key not in kept
    }


def _by_crossings(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    spans = [(first, last, reading) for reading in readings for first, last in reading.recomputes]
    endings: dict[bytes, Ending] = {}
    open_ends: list[int] = []
    for first, last, reading in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] < first:
            open_ends.pop()
        # A few operators may be counted to the end of one recompute or to the begin of the next.
        if reading.asked and open_ends and open_ends[-1] + SHORT_RUN < last:
            height = reading.expected - open_ends[-1] - 1
            endings[reading.key] = Ending(len(reading.operators), height)
        open_ends.append(last)
    return {key: ending for key, ending in endings.items() if ending.height >= 0}
