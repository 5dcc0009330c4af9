"""The Python interface: the command line's answers as objects, with tables and figures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recompute_scan.analysis import tables
from recompute_scan.analysis.loading import load_each
from recompute_scan.analysis.pipeline import analyse, result_at
from recompute_scan.errors import InputError
from recompute_scan.files import content
from recompute_scan.result import Cost, Finding, Result, Verdict, from_json, to_json
from recompute_scan.result.comparison import Comparison
from recompute_scan.result.comparison import compare as compare_results
from recompute_scan.trace.columns import Trace
from recompute_scan.workers import Workers

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


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
    return Scan(from_json(content(Path(path), held=True)))


def _named(name: str, given: PathLike | Scan) -> tuple[Result, str]:
    if isinstance(given, Scan):
        return given.result, name
    return result_at(os.fspath(given)), os.fspath(given)


@dataclass(frozen=True)
class Events:
    """The events of one rank's trace.

    Attributes:
        rank: The rank, 0-based.
        columns: The trace as it was read, one array a column.
    """

    rank: int
    columns: Trace = field(repr=False)

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row per event, in the order of the file, indexed by ``event``.

        Columns: :data:`recompute_scan.analysis.tables.EVENTS`. Times are ns on the trace's own
        clock. Python frames are not in it.
        """
        return tables.event_table(self.columns)


@dataclass(frozen=True)
class Scan:
    """What was found out about one run; in Jupyter it shows itself.

    Attributes:
        result: The whole document; its classes are in :mod:`recompute_scan.result`.
        traces: Where the traces lie that it was made from; empty for a result that was loaded.
        keeps: What must live as long as this does, such as a folder that is deleted afterwards.
    """

    result: Result
    traces: tuple[str, ...] = field(default=(), compare=False, repr=False)
    keeps: object = field(default=None, compare=False, repr=False)

    @property
    def verdict(self) -> Verdict:
        """``none``, ``partial``, ``full``, ``doubled`` or ``inconclusive``."""
        return self.result.verdict

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return self.result.headline

    @property
    def recompute_per_backward(self) -> float | None:
        """How often forward work runs again per backward pass: the highest m that matters."""
        return self.result.recompute_per_backward

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The problems found."""
        return self.result.findings

    @property
    def cost(self) -> Cost | None:
        """What the recomputes cost, in ms; ``None`` where the trace cannot tell."""
        return self.result.cost

    @property
    def regions(self) -> pd.DataFrame:
        """One row per block, in forward order, indexed by ``ordinal`` (0, 1, …).

        Columns: :data:`recompute_scan.analysis.tables.REGIONS`. Times are ms, per step.
        """
        return tables.region_table(self.result)

    @property
    def families(self) -> pd.DataFrame:
        """One row per family of operators, indexed by ``family`` (text).

        Columns: :data:`recompute_scan.analysis.tables.FAMILIES`. Counts and times (ms) are per
        step.
        """
        return tables.family_table(self.result)

    @cached_property
    def trace(self) -> Events:
        """The trace of the lowest rank that was recorded; read when first asked for, then kept.

        Raises:
            InputError: It can no longer be read, or there is none (``E308``).
        """
        return self.trace_of()

    def trace_of(self, rank: int | None = None) -> Events:
        """The trace of one rank, read anew.

        Args:
            rank: 0-based; ``None`` for the lowest that was recorded.

        Raises:
            InputError: It can no longer be read, or there is none (``E308``).
        """
        if rank is None:
            rank = min((one.rank for one in self.result.ranks), default=0)
        failures: list[InputError] = []
        for one in load_each(self._with_traces(), failures):
            if one.rank == rank:
                return Events(one.rank, one.trace)
        raise failures[0] if failures else InputError("E308", f"There is no trace of rank {rank}.")

    def timeline_figure(self) -> go.Figure:
        """One layer's operators in the forward pass and in each recompute, one above the other."""
        from recompute_scan.report.plots import timeline_figure  # noqa: PLC0415

        return timeline_figure(self.result)

    def cost_figure(self) -> go.Figure:
        """Where a step's time goes, before and after the fix."""
        from recompute_scan.report.plots import cost_figure  # noqa: PLC0415

        return cost_figure(self.result)

    def regions_figure(self) -> go.Figure:
        """How often each layer was recomputed, in forward order, with what is redundant of it."""
        from recompute_scan.report.plots import regions_figure  # noqa: PLC0415

        return regions_figure(self.result)

    def to_hta(self) -> Any:
        """The traces as an ``hta.common.trace.Trace``, by rank, for Holistic Trace Analysis.

        They are read again. HTA's analysers take it: ``BreakdownAnalysis.
        get_temporal_breakdown(scan.to_hta(), visualize=False)``.

        Raises:
            UsageError: HTA is not installed (``E212``).
            InputError: A trace can no longer be read, or there is none (``E308``).
        """
        from recompute_scan.hta_bridge import to_hta  # noqa: PLC0415

        failures: list[InputError] = []
        loaded = {one.rank: one.trace for one in load_each(self._with_traces(), failures)}
        if failures:
            raise failures[0]
        return to_hta(loaded)

    def to_json(self) -> str:
        """The document that ``analyze --format json`` prints."""
        return to_json(self.result)

    def to_html(self) -> str:
        """The report: one self-contained page."""
        from recompute_scan.report.html import render_html  # noqa: PLC0415

        return render_html(self.result)

    def to_markdown(self) -> str:
        """A summary for an issue tracker."""
        from recompute_scan.report.text import render_markdown  # noqa: PLC0415

        return render_markdown(self.result)

    def _with_traces(self) -> tuple[str, ...]:
        if not self.traces:
            raise InputError("E308", "This result was loaded without its traces.")
        return self.traces

    def __repr__(self) -> str:
        many = self.recompute_per_backward
        recomputes = "" if many is None else f", {many:g} recomputes per backward"
        where = f" of {', '.join(self.traces[:2])}{', …' * (len(self.traces) > 2)}"
        return f"<Scan{where * bool(self.traces)}: {self.verdict}{recomputes}>"

    def __str__(self) -> str:
        from recompute_scan.report.text import render_text  # noqa: PLC0415

        return render_text(self.result, color=False)

    def _repr_html_(self) -> str:
        from recompute_scan.report.html import render_brief_html  # noqa: PLC0415

        return render_brief_html(self.result)
