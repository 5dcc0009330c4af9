"""Why a file gives not one event: no JSON, no trace, an empty one, or too deep."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from recompute_scan.errors import InputError
from recompute_scan.trace.brackets import nesting
from recompute_scan.trace.limits import Limits, refuse_depth
from recompute_scan.trace.repair import mend_text
from recompute_scan.trace.schema import UNREADABLE, decode_document, decode_events
from recompute_scan.trace.sniff import broken_archive, no_events, no_json, no_trace

# Deep nesting shows at once.
_LOOKED_AT = 1 << 20


def nothing_kept(source: str, health: Mapping[str, int]) -> InputError:
    """Why not one event was kept of a file that has a first one."""
    if health.get("archive_damaged"):
        return broken_archive(source)
    if health.get("cut_short"):
        return no_json(source, b"{", "it is cut before its first event ends")
    if health.get("events_dropped"):
        return no_json(source, b"{", "not one of its events can be read")
    return no_events(source)


def without_events(
    source: str, data: bytes, whole: bool, limits: Limits, health: Mapping[str, int]
) -> InputError:
    """Why there is nothing to read in a file without a first event.

    Args:
        source: The file's name.
        data: Its beginning.
        whole: Whether that is all of it.
        limits: Bounds the nesting.
        health: Counters of the file.
    """
    if health.get("archive_damaged"):
        return broken_archive(source)
    if nesting(data[:_LOOKED_AT], limits.depth + 1) > limits.depth:
        return refuse_depth(source, limits.depth)
    if not whole:
        if data.lstrip()[:1] not in (b"{", b"[", b'"'):
            return no_json(source, data, "it does not begin as JSON does")
        return no_trace(source, data, "it does not begin as a trace does")
    said = ""
    for attempt in (data, mend_text(data)):
        try:
            if attempt.lstrip().startswith(b"["):
                decode_events(attempt)
            elif decode_document(attempt).traceEvents is None:
                return no_trace(source, data, 'it has no "traceEvents"')
            return no_events(source)
        except msgspec.ValidationError as error:
            return no_trace(source, data, str(error))
        except UNREADABLE as error:
            said = said or str(error)
    return no_json(source, data, said)
