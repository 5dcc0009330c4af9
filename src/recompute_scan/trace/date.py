"""The day on which a trace was recorded."""

from __future__ import annotations

from datetime import datetime, timezone

from recompute_scan.trace.columns import Trace

# Kineto writes times since this one, in ns since 1970; older ones had no such field.
_BASE = "baseTimeNanoseconds"
_FIRST, _LAST = datetime(2015, 1, 1, tzinfo=timezone.utc), datetime(2100, 1, 1, tzinfo=timezone.utc)


def recorded_on(trace: Trace) -> str | None:
    """``2026-11-20`` (UTC); ``None`` where the file does not say, or says what cannot be."""
    base = trace.metadata.get(_BASE)
    if not isinstance(base, int) or isinstance(base, bool) or not len(trace):
        return None
    seconds = (base + int(trace.ts.min())) // 10**9
    if not _FIRST.timestamp() <= seconds < _LAST.timestamp():
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).date().isoformat()
