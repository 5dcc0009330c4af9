"""The Python interface: the same answers as the command line, with tables and figures.

>>> import recompute_scan as rs
>>> scan = rs.analyze("trace.json.gz")          # doctest: +SKIP
>>> scan.verdict, scan.regions                  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from recompute_scan.analysis.comparison import Comparison
from recompute_scan.analysis.comparison import compare as compare_results
from recompute_scan.analysis.pipeline import analyse, result_at
from recompute_scan.analysis.scan import Scan
from recompute_scan.result import Result, from_json
from recompute_scan.workers import Workers

PathLike = str | os.PathLike[str]


def analyze(
    traces: PathLike | Iterable[PathLike], *, workers: int = 1, dask: str | None = None
) -> Scan:
    """What the given traces show.

    Args:
        traces: A trace file, a folder of one trace a rank (such as ``recompute-scan run``
            writes), a remote address (``s3://…``), or several of these.
        workers: Processes that read the ranks. With more than one, a script that calls this
            must keep its own work under ``if __name__ == "__main__"``: they import it.
        dask: Address of a Dask scheduler, or the path of its scheduler file; its workers read
            the ranks instead.

    Raises:
        InputError: Nothing could be read; its text says why and what to try.
        UsageError: The scheduler does not answer (``E219``), or Dask is not installed (``E201``).
    """
    paths = [traces] if isinstance(traces, (str, os.PathLike)) else list(traces)
    found = tuple(os.fspath(path) for path in paths)
    return Scan(analyse(found, workers=Workers(workers, dask)), found)


def compare(before: PathLike | Scan, after: PathLike | Scan) -> Comparison:
    """What differs between two runs.

    Args:
        before: A scan, a run's folder, a trace or a folder of traces, or a ``result.json``.
        after: The same, of the later run.

    Raises:
        InputError: One of them could not be read.
    """
    (one, first), (other, second) = _named("before", before), _named("after", after)
    return compare_results(one, other, (first, second))


def load_result(path: PathLike) -> Scan:
    """A result that was written earlier (``result.json``).

    Raises:
        InputError: It is no such document.
        OSError: It cannot be read.
    """
    return Scan(from_json(Path(path).read_bytes()))


def _named(name: str, given: PathLike | Scan) -> tuple[Result, str]:
    if isinstance(given, Scan):
        return given.result, name
    return result_at(os.fspath(given)), os.fspath(given)
