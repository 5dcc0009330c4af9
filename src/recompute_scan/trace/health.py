"""Counters of what was repaired, lost or odd in a trace, and what each says to a person."""

from __future__ import annotations

from collections.abc import Mapping

# One sentence each; {n} is the count. Losses first: that is the order they are told in.
SENTENCES: dict[str, str] = {
    "cut_short": "The file ends in the middle: what was being written when it was cut is lost.",
    "archive_damaged": "The compressed data is damaged or cut; what came out before was read.",
    "events_dropped": "{n} events could not be read even after repair and were left out.",
    "events_without_time": "{n} events have no usable start and were left out.",
    "documents_after_first": "{n} more traces follow in the same file; only the first was read.",
    "bytes_after_end": "{n} bytes follow the end of the trace and were not read.",
    "metadata_unreadable": "What the file says about itself could not be read.",
    "args_dropped": "{n} events lost their arguments (shapes, numbers), which could not be read.",
    "events_repaired": "{n} events had broken quotes, backslashes or values and were repaired.",
    "text_repaired": (
        "{n} pieces of text had invalid UTF-8, control characters or halves of surrogate pairs, "
        "which were replaced."
    ),
    "metadata_repaired": "What the file says about itself was broken and was repaired.",
    "commas_dropped": "{n} commas too many were passed over.",
    "byte_order_mark": "The file begins with a byte order mark, which was passed over.",
    "events_without_duration": "{n} events have no usable duration; they count as instants.",
    "negative_durations": "{n} events have a negative duration; they count as instants.",
    "numbers_out_of_range": "{n} numbers are too large for their field and count as unknown.",
    "tables_damaged": "{n} tables of the database are damaged; what comes before was read.",
    "events_of_other_processes": (
        "{n} events belong to other processes of the same recording and were left out: only the "
        "process with the most operators was read."
    ),
    "ranges_without_end": "{n} NVTX ranges were still open when recording ended; left out.",
    "events_without_name": "{n} events have names that the file does not hold.",
    "names_shortened": "{n} names were too long and were cut.",
}


def sentences(health: Mapping[str, int]) -> tuple[str, ...]:
    """What a person should know of a trace's counters, losses first, one sentence each.

    Counters without a sentence (plain counts such as ``events``) are passed over.
    """
    return tuple(
        text.format(n=f"{health[name]:,}") for name, text in SENTENCES.items() if health.get(name)
    )


def count(health: dict[str, int], name: str, number: int = 1) -> None:
    """Add to a counter; only counters of :data:`SENTENCES` exist.

    Raises:
        KeyError: There is no such counter.
    """
    if name not in SENTENCES:
        raise KeyError(name)
    if number:
        health[name] = health.get(name, 0) + number
