"""How long a Perfetto trace takes to read, beside the JSON of the same recording.

    python benchmarks/pftrace.py                          the traces below
    python benchmarks/pftrace.py TRACE.json.gz …          others

The first is one step of ours twelve times over; the packets come from the writer of the tests, and
the JSON has no more blanks than it needs, fewer than Kineto's. CPU time,
the least of six readings, both in one process.
"""

from __future__ import annotations

import copy
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.sources.pftrace_builder import pftrace

from recompute_scan.trace import load

ROOT = Path(__file__).resolve().parent.parent
_STEP = ROOT / "traces" / "plain_twice" / "trace-rank0.json.gz"
_OTHERS = ("public/mi300x-resnet-checkpointed", "public/h100-nanogpt-compiled")
_TIMES = 12


def main() -> None:
    """Print one line for each trace, plain and in gzip."""
    named = [Path(name) for name in sys.argv[1:]]
    others = named or [ROOT / "traces" / f"{name}.json.gz" for name in _OTHERS]
    recordings = [(path.name, _document(path)) for path in (_STEP, *others)]
    if not named:
        recordings.insert(0, (f"{_STEP.name}, {_TIMES} times", _longer(recordings[0][1])))
    with tempfile.TemporaryDirectory() as folder:
        for name, document in recordings:
            text, packets = json.dumps(document).encode(), pftrace(document, packed=False)
            for how, pack in (("plain", bytes), ("gzip", lambda data: gzip.compress(data, 1))):
                times = []
                for suffix, data in ((".json", text), (".pftrace", packets)):
                    path = Path(folder) / f"trace{suffix}"
                    path.write_bytes(pack(data))
                    times.append(_least(path))
                sizes = f"{len(text) / 1e6:.1f} MB, {len(packets) / 1e6:.1f} MB"
                print(f"{name} ({sizes}), {how}: {times[1] / times[0]:.2f} times the JSON's")


def _document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def _longer(document: dict[str, Any]) -> dict[str, Any]:
    events = []
    for number in range(_TIMES):
        for event in copy.deepcopy(document["traceEvents"]):
            if event.get("ph") == "X":
                event["ts"] += number * 1e6
                if "Ev Idx" in event.get("args", {}):
                    event["args"]["Ev Idx"] += number * 10_000
            events.append(event)
    return {**document, "traceEvents": events}


def _least(path: Path) -> float:
    times = []
    for _ in range(6):
        start = time.process_time()
        load(path)
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
