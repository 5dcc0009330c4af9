"""Traces as other recordings would have them: times in whole microseconds, or no operators.

Torch up to 2.3 writes whole microseconds. There an operator begins and ends at ``start_time_ns /
1000`` and ``end_time_ns / 1000``, whole numbers (``passEventsToKineto`` in
``torch/csrc/profiler/collection.cpp``); what CUPTI measured, as runtime calls, has its duration
rounded off on its own.
"""

import gzip
import json
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from recompute_scan.trace.columns import Int64, Kind, Trace

# On such a host a quarter of the calls last 0 µs, as in traces of torch 2.2.
_EMPTY = 0.25
_US = 1000


def coarse(trace: Trace) -> Trace:
    """The trace with its times cut to whole microseconds."""
    start: Int64 = trace.ts // _US * _US
    of_calls = np.isin(trace.kind, (Kind.OP, Kind.ANNOTATION, Kind.PYTHON))
    until = (trace.ts + trace.dur) // _US * _US - start
    return replace(trace, ts=start, dur=np.where(of_calls, until, trace.dur // _US * _US))


def write_coarse(trace: Path, target: Path) -> Path:
    """Write a Kineto trace anew, as of a fast host whose times are whole microseconds.

    Args:
        trace: The trace, gzipped.
        target: The file to write, gzipped too.

    Returns:
        ``target``.
    """
    document = json.loads(gzip.decompress(trace.read_bytes()))
    events = [event for event in document["traceEvents"] if "ts" in event]
    begin = min(_ns(event["ts"]) for event in events)
    lengths = [_ns(event["dur"]) for event in events if event.get("cat") == "cpu_op"]
    # A call of d µs begins and ends in one microsecond in 1 - d of all cases.
    faster = max(1.0, float(np.quantile(lengths, _EMPTY)) / (_US * (1 - _EMPTY)))
    for event in events:
        start = _ns(event["ts"]) - begin
        until = start + _ns(event.get("dur", 0))
        event["ts"] = int(start / faster) // _US
        if "dur" in event:
            event["dur"] = int(until / faster) // _US - event["ts"]
    target.write_bytes(gzip.compress(json.dumps(document).encode(), compresslevel=1))
    return target


def _ns(us: float) -> int:
    return round(us * _US)


def without_operators(trace: Path, target: Path) -> Path:
    """The same trace as a recording of device activity alone would leave it; gzipped, both."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "cpu_op"]
    target.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    return target
