"""Why a file is no trace, or gives not one event: told from its first bytes, or from all."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from recompute_scan.errors import InputError
from recompute_scan.trace.kineto.brackets import measure_nesting
from recompute_scan.trace.kineto.repair import mend_text
from recompute_scan.trace.kineto.schema import UNREADABLE, decode_document, decode_events
from recompute_scan.trace.limits import Limits, refuse_depth
from recompute_scan.trace.looks import Look, look_at_bytes, look_at_json

_WRITER = "torch.profiler's export_chrome_trace"


def no_json(source: str, data: bytes, why: str) -> InputError:
    """``E302``: the file is no JSON at all.

    Args:
        source: The file's name.
        data: Its first bytes.
        why: What the decoder said; used where the bytes tell nothing better.
    """
    hint = f"give a trace that {_WRITER} wrote (.json, .json.gz, .json.zst or .zip)"
    look = look_at_bytes(data) or Look(why)
    return InputError("E302", f"{source} is not JSON.", why=look.what, hint=look.hint or hint)


def no_trace(source: str, data: bytes, why: str) -> InputError:
    """``E303``: the file is JSON, but no trace."""
    look = look_at_json(data) or Look(why)
    return InputError(
        "E303",
        f"{source} is JSON, but no profiler trace.",
        why=look.what,
        hint=look.hint or f"give a trace that {_WRITER} wrote",
    )


def no_events(source: str) -> InputError:
    """``E304``: a trace without a single event."""
    return InputError(
        "E304",
        f"{source} holds no events.",
        why="the profiler wrote an empty cycle, or recording stopped before it began",
        hint="record at least one whole step; a schedule needs repeat=1 or more steps",
    )


def broken_archive(source: str, why: str = "the compressed data is damaged or cut") -> InputError:
    """``E307``: compressed data of which not one event could be read."""
    return InputError(
        "E307",
        f"{source} is compressed, but cannot be inflated.",
        why=why,
        hint="copy the file again; it may have been cut short",
    )


# Deep nesting shows at once.
_SEARCHED = 1 << 20


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
    if measure_nesting(data[:_SEARCHED], limits.depth + 1) > limits.depth:
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
