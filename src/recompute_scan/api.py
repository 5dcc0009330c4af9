"""The Python interface: the same answers as the command line, with tables and figures.

>>> import recompute_scan as rs
>>> scan = rs.analyze("trace.json.gz")          # doctest: +SKIP
>>> scan.verdict, scan.regions                  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recompute_scan.comparison import Comparison
from recompute_scan.comparison import compare as compare_results
from recompute_scan.errors import InputError
from recompute_scan.loading import load_each
from recompute_scan.pipeline import analyse, result_at
from recompute_scan.result import Cost, Family, Finding, Result, Verdict, from_json, to_json

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Scan:
    """What was found out about one run; in Jupyter it shows itself.

    Attributes:
        result: The whole document; its classes are in :mod:`recompute_scan.result`.
        traces: Where the traces lie that it was made from; empty for a result that was loaded.
    """

    result: Result
    traces: tuple[str, ...] = field(default=(), compare=False, repr=False)

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
        """What the replays cost, in ms; ``None`` where the trace cannot tell."""
        return self.result.cost

    @property
    def regions(self) -> pd.DataFrame:
        """One row per layer, in forward order, indexed by ``ordinal``.

        Columns: ``module``, ``module_class`` and ``signature`` (text), ``forward_runs_per_step``,
        ``recompute_runs_per_backward`` and ``mean_recompute`` (numbers), ``forward_ms_per_step``,
        ``recompute_ms_per_step`` and ``surplus_ms_per_step`` (ms), ``checkpoints`` (text,
        outermost first, separated by `` > ``; empty where there is none).
        """
        import pandas as pd  # noqa: PLC0415 - costs more than most analyses

        rows = [
            {
                "ordinal": region.ordinal,
                "module": region.module,
                "module_class": region.module_class,
                "signature": region.signature,
                "forward_runs_per_step": region.forward_runs_per_step,
                "recompute_runs_per_backward": region.recompute_runs_per_backward,
                "mean_recompute": region.mean_recompute,
                "forward_ms_per_step": region.forward_ms_per_step,
                "recompute_ms_per_step": region.recompute_ms_per_step,
                "surplus_ms_per_step": region.surplus_ms_per_step,
                "checkpoints": " > ".join(
                    " ".join(filter(None, (c.mechanism, c.variant))) or "checkpoint"
                    for c in region.checkpoints
                ),
            }
            for region in self.result.regions
        ]
        columns = list(rows[0]) if rows else ["ordinal"]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=columns).set_index("ordinal")
        return frame

    @property
    def families(self) -> pd.DataFrame:
        """One row per family of operators, indexed by ``family``; counts and ms per step."""
        import pandas as pd  # noqa: PLC0415

        fields = [field.name for field in dataclasses.fields(Family)]
        rows = [[getattr(family, field) for field in fields] for family in self.result.families]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=fields).set_index("family")
        return frame

    def timeline(self) -> go.Figure:
        """One layer's operators in the forward pass and in each replay, one above the other."""
        from recompute_scan.report.plots import timeline_figure  # noqa: PLC0415

        return timeline_figure(self.result)

    def cost_figure(self) -> go.Figure:
        """Where a step's time goes, before and after the fix."""
        from recompute_scan.report.plots import cost_figure  # noqa: PLC0415

        return cost_figure(self.result)

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
        loaded = {one.rank: one.trace for one in load_each(self.traces, failures)}
        if failures:
            raise failures[0]
        if not loaded:
            raise InputError("E308", "This result was loaded without its traces.")
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
        from recompute_scan.report.markdown import render_markdown  # noqa: PLC0415

        return render_markdown(self.result)

    def __str__(self) -> str:
        from recompute_scan.report.text import render_text  # noqa: PLC0415

        return render_text(self.result, color=False)

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415

        from recompute_scan.report.escape import visible  # noqa: PLC0415

        return f"<p><b>{self.verdict}</b>: {escape(visible(self.headline, 400))}</p>"


def analyze(traces: PathLike | Iterable[PathLike]) -> Scan:
    """What the given traces show.

    Args:
        traces: A trace file, a folder of one trace a rank (such as ``recompute-scan run``
            writes), a remote address (``s3://…``), or several of these.

    Raises:
        InputError: Nothing could be read; its text says why and what to try.
    """
    paths = [traces] if isinstance(traces, (str, os.PathLike)) else list(traces)
    found = tuple(os.fspath(path) for path in paths)
    return Scan(analyse(found), found)


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


def _named(name: str, given: PathLike | Scan) -> tuple[Result, str]:
    if isinstance(given, Scan):
        return given.result, name
    return result_at(os.fspath(given)), os.fspath(given)


def load_result(path: PathLike) -> Scan:
    """A result that was written earlier (``result.json``).

    Raises:
        InputError: It is no such document.
        OSError: It cannot be read.
    """
    return Scan(from_json(Path(path).read_bytes()))
