"""Loaded traces for Holistic Trace Analysis, and its breakdowns of them.

HTA's own loader is left alone: it is handed frames that are parsed already, in the columns and with
the symbol table that its analyses read (``hta/common/trace.py``; seen on traceinsight 0.6.1 with
pandas 3.1 and 2.3). Times are µs with their fractions, and no step is dropped.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from recompute_scan.errors import UsageError, how_to_add
from recompute_scan.result import Hta
from recompute_scan.trace.columns import Kind, Trace

if TYPE_CHECKING:
    import pandas as pd


# Kineto's own names, which HTA looks for.
_CATEGORIES = {
    Kind.OP: "cpu_op",
    Kind.ANNOTATION: "user_annotation",
    Kind.RUNTIME: "cuda_runtime",
    Kind.KERNEL: "kernel",
    Kind.COPY: "gpu_memcpy",
    Kind.PYTHON: "python_function",
    Kind.OTHER: "",
}
_ON_DEVICE = (Kind.KERNEL, Kind.COPY)


def to_hta(traces: Mapping[int, Trace]) -> Any:
    """An ``hta.common.trace.Trace`` of these traces, by rank; HTA's analysers take it as it is.

    Raises:
        UsageError: HTA is not installed (``E212``).
    """
    try:
        from hta.common import trace as hta_trace  # noqa: PLC0415
        from hta.common.trace_symbol_table import TraceSymbolTable  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            "E212",
            "Holistic Trace Analysis is not installed.",
            why=str(error),
            hint=how_to_add("hta"),
        ) from None
    with _quiet():
        made = hta_trace.Trace(trace_files={}, trace_dir="")
        symbols = TraceSymbolTable()
        symbols.add_symbols(_CATEGORIES.values())
        for trace in traces.values():
            symbols.add_symbols(trace.names)
        made.symbol_table = symbols
        for rank, trace in traces.items():
            made.traces[rank] = _frame(trace, symbols.get_sym_id_map())
        made.is_parsed = True
    return made


def break_down(trace: Trace) -> Hta | None:
    """HTA's breakdowns of one trace; ``None`` without a GPU's work in it.

    Raises:
        UsageError: HTA is not installed (``E212``).
    """
    if not np.isin(trace.kind, _ON_DEVICE).any():
        return None
    made = to_hta({0: trace})
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis  # noqa: PLC0415
    from hta.analyzers.communication_analysis import CommunicationAnalysis  # noqa: PLC0415

    with _quiet():
        temporal = BreakdownAnalysis.get_temporal_breakdown(made, visualize=False).iloc[0]
        overlap = CommunicationAnalysis.get_comm_comp_overlap(made, visualize=False).iloc[0]
        types, _ = BreakdownAnalysis.get_gpu_kernel_breakdown(
            made, visualize=False, include_memory_kernels=True
        )
    overlapped = float(overlap["comp_comm_overlap_pctg"])
    return Hta(
        kernel_time_ms=float(temporal["kernel_time(us)"]) / 1000,
        idle_pct=float(temporal["idle_time_pctg"]),
        compute_pct=float(temporal["compute_time_pctg"]),
        non_compute_pct=float(temporal["non_compute_time_pctg"]),
        overlap_pct=overlapped if math.isfinite(overlapped) else None,
        kernel_types={
            str(kind).lower().replace("_", " "): float(share)
            for kind, share in zip(types["kernel_type"], types["percentage"], strict=True)
        },
    )


def _frame(trace: Trace, symbols: Mapping[str, int]) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415

    device = np.isin(trace.kind, _ON_DEVICE)
    names = np.array([symbols[name] for name in trace.names], np.int64)
    categories = {int(kind): symbols[text] for kind, text in _CATEGORIES.items()}
    rows = np.arange(len(trace))
    threads = np.array(
        [[_number(part) for part in pair] for pair in trace.threads], np.int64
    ).reshape(-1, 2)
    first = int(trace.ts.min()) if len(trace) else 0
    frame: pd.DataFrame = pd.DataFrame(
        {
            "index": rows,
            "cat": np.vectorize(categories.get, otypes=[np.int64])(trace.kind),
            "name": names[trace.name],
            "pid": threads[trace.thread, 0],
            "tid": threads[trace.thread, 1],
            "ts": (trace.ts.astype(np.int64) - first) / 1000,
            "dur": trace.dur / 1000,
            "stream": np.where(device, np.maximum(trace.stream, 0), -1),
            "correlation": trace.correlation,
            "index_correlation": _partners(trace, device),
            "iteration": _iterations(trace),
        }
    )
    indexed: pd.DataFrame = frame.set_index("index", drop=False)
    return indexed


def _partners(trace: Trace, device: Any) -> Any:
    """Row of each launch's work, and of each work's launch; -1 for none."""
    partner = np.full(len(trace), -1, np.int64)
    launches = np.flatnonzero((trace.kind == Kind.RUNTIME) & (trace.correlation >= 0))
    works = np.flatnonzero(device & (trace.correlation >= 0))
    by_number = dict(zip(trace.correlation[launches].tolist(), launches.tolist(), strict=True))
    for work in works.tolist():
        launch = by_number.get(int(trace.correlation[work]))
        if launch is not None:
            partner[work], partner[launch] = launch, work
    return partner


def _iterations(trace: Trace) -> Any:
    """Number of the profiler's step in which each event starts; -1 outside any."""
    number = np.full(len(trace), -1, np.int64)
    for row in np.flatnonzero(trace.kind == Kind.ANNOTATION).tolist():
        step = trace.names[trace.name[row]]
        if step.startswith("ProfilerStep#") and step[13:].isdecimal():
            start = int(trace.ts[row])
            inside = (trace.ts >= start) & (trace.ts < start + int(trace.dur[row]))
            number[inside] = int(step[13:])
    return number


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 18 else -1


@contextmanager
def _quiet() -> Iterator[None]:
    """Without its logger's words on progress, and what newer pandas say of its calls."""
    logger = logging.getLogger("hta")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
