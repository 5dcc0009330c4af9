"""Counters of repaired, lost and odd events in a trace, and the day on which it was recorded.

Since torch 2.0 the profiler numbers what it recorded on the host from 0 on, Python frames and
instants included (``Ev Idx``, ``torch/csrc/autograd/profiler_kineto.cpp``). A file in which some
of the numbers are missing lost those events; one with more events than numbers has some twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from msgspec import Struct

from recompute_scan.trace.columns import Trace

# Kineto writes times since this one, in ns since 1970; older ones had no such field.
_BASE = "baseTimeNanoseconds"
_FIRST, _LAST = datetime(2015, 1, 1, tzinfo=timezone.utc), datetime(2100, 1, 1, tzinfo=timezone.utc)
# One sentence each, in the order of the report: losses first. {n} is the count, {share} its share
# of all events, {of} the counter of the same name with `_of` behind it.
SENTENCES: dict[str, str] = {
    "cut_short": "The file ends in the middle: what was being written when it was cut is lost.",
    "archive_damaged": "The compressed data is damaged or cut; it was read up to that place.",
    "events_dropped": "{n} events could not be read even after repair and were left out.",
    "events_missing": "{n} of the {of} events that the profiler recorded are not in the file.",
    "events_twice": "{n} events are in the file more than once; the profiler recorded {of}.",
    "events_without_time": "{n} events{share} have no usable start and were left out.",
    "documents_after_first": "{n} more traces follow in the same file; only the first was read.",
    "bytes_after_end": "{n} bytes follow the end of the trace and were not read.",
    "metadata_unreadable": "The file's metadata could not be read.",
    "args_dropped": (
        "{n} events{share} lost their arguments (shapes, numbers), which could not be read."
    ),
    "events_repaired": "{n} events had broken quotes, backslashes or values and were repaired.",
    "text_repaired": (
        "{n} pieces of text had invalid UTF-8, control characters or halves of surrogate pairs, "
        "which were replaced."
    ),
    "metadata_repaired": "The file's metadata was broken and was repaired.",
    "commas_dropped": "{n} extra commas were skipped.",
    "byte_order_mark": "The file begins with a byte order mark, which was skipped.",
    "events_without_duration": "{n} events{share} have no usable duration; they count as instants.",
    "negative_durations": "{n} events{share} have a negative duration; they count as instants.",
    "numbers_out_of_range": (
        "{n} numbers{share} are negative or too large for their field and count as unknown."
    ),
    "tables_damaged": "{n} tables of the database are damaged; they were read up to that place.",
    "events_of_other_processes": (
        "{n} events belong to other processes of the same recording and were left out: only the "
        "process with the most operators was read."
    ),
    "ranges_without_end": "{n} NVTX ranges were still open when recording ended; left out.",
    "events_without_name": "{n} events{share} have names that the file does not hold.",
    "events_without_thread": "{n} events{share} do not say which thread or process they ran in.",
    "events_without_category": (
        "{n} events{share} do not say that they are operators, though they are called so."
    ),
    "events_without_args": "{n} operators{share} have no arguments, while others have.",
    "names_shortened": "{n} names were too long and were cut.",
    "nodes_apart": (
        "{n} of {of} backward nodes and the ranges that the engine opens for them stand apart: "
        "events are missing, or their times, threads or names are wrong."
    ),
    "numbers_astray": (
        "{n} of {of} backward nodes have no number that leads to an operator before them: events "
        "are missing, or their numbers, times or names are wrong."
    ),
    "operators_unlike": (
        "{n} of {of} operators call other operators than nearly all operators of their kind do: "
        "events are missing, or their times, threads or names are wrong."
    ),
    "recomputes_uneven": (
        "{n} of {of} steps run the forward pass of the others and recompute other parts of it: "
        "the script decides that in each step, or events are missing."
    ),
    "shapes_missing": "{n} of {of} operators have no shapes, while others of their name have.",
}
# With these, something is lost that an answer may rest on. Python text, metadata, and events of
# other processes are not of that kind, nor is what was repaired.
_LOSSES = (
    *("cut_short", "archive_damaged", "events_dropped", "args_dropped", "tables_damaged"),
    *("events_missing", "events_twice"),
    *("events_without_time", "events_without_duration", "negative_durations"),
    *("events_without_name", "events_without_thread", "events_without_category"),
    *("events_without_args", "numbers_out_of_range", "names_shortened"),
    *("nodes_apart", "numbers_astray", "operators_unlike", "shapes_missing", "recomputes_uneven"),
)


def recorded_on(trace: Trace) -> str | None:
    """``2026-11-20`` (UTC); ``None`` where the file does not say, or says what cannot be."""
    base = trace.metadata.get(_BASE)
    if not isinstance(base, int) or isinstance(base, bool) or not len(trace):
        return None
    seconds = (base + int(trace.ts.min()) - trace.moved) // 10**9
    if not _FIRST.timestamp() <= seconds < _LAST.timestamp():
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).date().isoformat()


def lost_evidence(health: Mapping[str, int]) -> bool:
    """Is something lost, or not where it belongs, that an answer may rest on?"""
    return any(health.get(counter) for counter in _LOSSES)


def sentences(health: Mapping[str, int], events: int = 0) -> tuple[str, ...]:
    """Sentences for a trace's counters, losses first.

    Counters without a sentence (plain counts such as ``events``) are passed over.

    Args:
        health: The counters.
        events: How many events the trace has, for the share of events that lost something.
    """
    return tuple(
        text.format(
            n=f"{health[name]:,}",
            of=f"{health.get(f'{name}_of', 0):,}",
            share=_share(health[name], events),
        )
        for name, text in SENTENCES.items()
        if health.get(name)
    )


def _share(number: int, events: int) -> str:
    if number > events:
        return ""  # not known of how many
    percent = 100 * number / events
    return f" ({percent:.0f} %)" if percent >= 1 else " (under 1 %)"


def count(health: dict[str, int], name: str, number: int = 1) -> None:
    """Add to a counter; only counters of :data:`SENTENCES` exist.

    Raises:
        KeyError: There is no such counter.
    """
    if name not in SENTENCES:
        raise KeyError(name)
    if number:
        health[name] = health.get(name, 0) + number


_MOST_NUMBERS = 2**31


class Numbering(Struct):
    """Counts events that have a number.

    Attributes:
        events: How many had one.
        numbers: How many numbers were given out at least: one more than the highest.
    """

    events: int = 0
    numbers: int = 0

    def add(self, values: Sequence[Any]) -> None:
        """Take in the numbers of some events, -1 or anything else where there is none."""
        absent = values.count(-1)
        if absent == len(values):
            return
        try:
            highest = max(values)
            odd = min(values) < -1 or highest >= _MOST_NUMBERS
        except TypeError:
            odd = True
        if odd:
            values = [n for n in values if isinstance(n, int) and -1 <= n < _MOST_NUMBERS]
            absent = values.count(-1)
            highest = max(values, default=-1)
        self.join(len(values) - absent, int(highest) + 1)

    def join(self, events: int, numbers: int = 0) -> None:
        """Take in events that were counted elsewhere."""
        self.events += events
        self.numbers = max(self.numbers, numbers)

    def report(self, health: dict[str, int]) -> None:
        """Count the events that are missing, or there more than once."""
        if not self.numbers or self.events == self.numbers:
            return
        name = "events_missing" if self.events < self.numbers else "events_twice"
        count(health, name, abs(self.numbers - self.events))
        health[f"{name}_of"] = self.numbers
