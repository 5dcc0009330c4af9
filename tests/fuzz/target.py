"""From any bytes to a result: nothing but our own errors may come out.

Coverage-guided, with atheris (not a dependency; ``pip install atheris``), from the repository's
root::

    python -m tests.fuzz.target -max_total_time=1800 -max_len=65536 FOLDER tests/damage/corpus

``FOLDER`` keeps what was found. An ordinary test runs the same function over the corpus.
"""

from __future__ import annotations

import io
import sys

from recompute_scan.errors import ScanError
from recompute_scan.recompute.facts import study
from recompute_scan.result import from_json, to_json
from recompute_scan.trace import Limits, Trace
from recompute_scan.trace.kineto import read

# Small, so that a bomb is refused before a fuzzer calls it a hang.
LIMITS = Limits(
    inflated_bytes=2**26, ratio=200, ratio_from=2**20, events=200_000, event_bytes=2**24
)


def load(data: bytes) -> Trace:
    """The trace in these bytes."""
    return read(io.BytesIO(data), "fuzzed.json", limits=LIMITS, health={})


def one_input(data: bytes) -> None:
    """Read, analyse and write one input; any exception but a :class:`ScanError` is a bug."""
    try:
        trace = load(data)
    except ScanError:
        return
    judgement = study(trace).judgement
    assert judgement.verdict in ("none", "partial", "full", "doubled", "inconclusive")


def round_trip(data: bytes) -> None:
    """The same down to the JSON document and back; slower, for the replayed corpus."""
    from recompute_scan.answer import result_of  # noqa: PLC0415

    try:
        trace = load(data)
    except ScanError:
        return
    result = result_of(trace)
    assert from_json(to_json(result)) == result


def main() -> None:
    import atheris  # noqa: PLC0415 - only here

    atheris.instrument_all()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
