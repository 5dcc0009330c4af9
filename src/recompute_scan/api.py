"""Scans, results and figures for people who use Python.

The Python interface: the command line's answers as objects, with tables and figures.

Results and traces as pandas tables: the contents of each column are data here, and the page
``docs/python-api.md`` is made from it.

Times of results are ms, of events ns; counts are per step unless a name says otherwise. A value
that is not known is missing (``NaN``, ``<NA>``), never 0.

Plotly figures for notebooks. This is the only module that imports plotly.

Plotly reads a small markup (``<b>``, ``<a href>``, ``<br>``) and LaTeX between dollar signs in
every label, so each name goes through :func:`label` first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from msgspec import Struct

from recompute_scan import units
from recompute_scan.analysis.inputs import load_each
from recompute_scan.analysis.pipeline import analyse, result_at
from recompute_scan.errors import InputError
from recompute_scan.files import content, newest_run
from recompute_scan.report import summary, words
from recompute_scan.report.blocks import block_label
from recompute_scan.report.figures import (
    COLOURS,
    FAMILY_FILLS,
    PART_FILLS,
    PARTS,
    cost_bars,
    family_colours,
    short_name,
)
from recompute_scan.report.templating import visible
from recompute_scan.result import (
    Checkpoint,
    Cost,
    Finding,
    Proof,
    ProofOp,
    Result,
    Verdict,
    from_json,
    to_json,
)
from recompute_scan.result.compare import Comparison
from recompute_scan.result.compare import compare as compare_results
from recompute_scan.trace.calls import find_steps, nest, step_of
from recompute_scan.trace.columns import KIND_NAMES, Ints, Trace
from recompute_scan.workers import Workers

if TYPE_CHECKING:
    import pandas as pd


class Column(Struct, frozen=True):
    """One column: its name, pandas dtype, unit (empty where there is none) and meaning."""

    name: str
    dtype: str
    unit: str
    about: str


REGIONS = (
    Column("module", "string", "", "name in the model, such as `model.layers.0`"),
    Column("module_class", "string", "", "class of the module"),
    Column("signature", "string", "", "families of the block's operators"),
    Column("forward_runs_per_step", "float64", "runs", "forward passes through it in one step"),
    Column("recompute_runs_per_backward", "float64", "runs", "recomputes in each backward pass"),
    Column("mean_recompute", "float64", "runs", "the same, weighted by the time of its operators"),
    Column("forward_ms_per_step", "float64", "ms", "time of its forward passes"),
    Column("recompute_ms_per_step", "float64", "ms", "time of all its recomputes"),
    Column("redundant_ms_per_step", "float64", "ms", "time of the recomputes beyond the first"),
    Column("backward_passes", "float64", "", "backward passes per forward pass, at most"),
    Column("checkpoints", "string", "", "mechanism and variant of each, outermost first, by ` > `"),
)
FAMILIES = (
    Column("kind", "string", "", "`attention`, `gemm`, `norm`, …"),
    Column("forward_per_step", "float64", "calls", "calls in the forward pass"),
    Column("recomputed_per_step", "float64", "calls", "calls in recomputes"),
    Column("backward_per_step", "float64", "calls", "calls of the backward formula"),
    Column("recompute_ms_per_step", "float64", "ms", "time of its recomputes"),
)
WORK = (
    Column("kind", "string", "", "`repeated`, `repeated-rows`, `unread`, … as in the report"),
    Column("line", "string", "", "`file:line` of the module call or the operators"),
    Column("module", "string", "", "name of the first module"),
    Column("module_class", "string", "", "class of the modules"),
    Column("operators", "int64", "calls", "operators in one step"),
    Column("ms", "float64", "ms", "their time, with the backward pass that they cause"),
    Column("share", "float64", "", "their share of the operators' time, 0 to 1"),
    Column("least_ms", "float64", "ms", "what a repair saves at least"),
    Column("most_ms", "float64", "ms", "what it saves at most"),
    Column("same_as", "string", "", "`file:line` of the others that compute the same"),
    Column("needs", "string", "", "what the repair takes: `detach` or `retain-graph`"),
)
MEMORY = (
    Column("kind", "string", "", "`between`, `after-backward` or `never-read`"),
    Column("line", "string", "", "`file:line` that made the first of it"),
    Column("module_class", "string", "", "class of the layers, of `between`"),
    Column("bytes", "int64", "bytes", "how much is kept"),
    Column("tensors", "int64", "", "in how many storages"),
    Column("holder", "string", "", "the Python object that holds it, where one was found"),
)
EVENTS = (
    Column("name", "category", "", "as the profiler wrote it; not escaped"),
    Column("kind", "category", "", "`op`, `annotation`, `runtime`, `kernel`, `copy` or `other`"),
    Column("process", "category", "", "process, or the device it ran on, as text"),
    Column("thread", "category", "", "thread, or the device's stream, as text"),
    Column("stream", "Int64", "", "the device's stream; missing on the host"),
    Column("start_ns", "int64", "ns", "on the trace's own clock"),
    Column("duration_ns", "int64", "ns", "0 or more"),
    Column("step", "Int64", "", "number of the profiler's step that it starts in"),
    Column("sequence", "Int64", "", "autograd's number, shared by a forward call and its backward"),
    Column("correlation", "Int64", "", "shared by a launch and the kernel that it launched"),
    Column("shapes", "category", "", "shapes of the inputs, as JSON text"),
    Column("types", "category", "", "types of the inputs, as JSON text"),
)


def event_table(trace: Trace) -> pd.DataFrame:
    """One row an event, in the order of the file, indexed by ``event``; columns: :data:`EVENTS`."""
    import pandas as pd  # noqa: PLC0415 - costs more than most analyses

    def coded(codes: Ints, texts: Sequence[str | None]) -> pd.Categorical:
        # Names may occur twice (of two threads, for example), categories may not.
        distinct = list(dict.fromkeys(text for text in texts if text is not None))
        places = {text: place for place, text in enumerate(distinct)}
        table = np.array([-1 if text is None else places[text] for text in texts], np.int64)
        taken = table[codes] if len(codes) else np.zeros(0, np.int64)
        return pd.Categorical.from_codes(taken, categories=pd.Index(distinct, dtype="str"))

    def known(numbers: Ints) -> pd.Series[Any]:
        column: pd.Series[Any] = pd.Series(numbers.astype(np.int64), dtype="Int64")
        column[numbers < 0] = pd.NA
        return column

    steps = find_steps(nest(trace))
    place = step_of(steps, trace.ts)
    numbers = np.array([step.index for step in steps] or [-1], np.int64)
    signatures = [_parts(text) for text in trace.signatures]
    values: dict[str, Any] = {
        "name": coded(trace.name, trace.names),
        "kind": coded(trace.kind, list(KIND_NAMES)),
        "process": coded(trace.thread, [process for process, _ in trace.threads]),
        "thread": coded(trace.thread, [thread for _, thread in trace.threads]),
        "stream": known(trace.stream),
        "start_ns": trace.ts.astype(np.int64),
        "duration_ns": trace.dur.astype(np.int64),
        "step": known(np.where(place >= 0, numbers[place], -1)),
        "sequence": known(trace.sequence),
        "correlation": known(trace.correlation),
        "shapes": coded(trace.dims, [shapes for shapes, _ in signatures]),
        "types": coded(trace.dims, [types for _, types in signatures]),
    }
    return _typed(EVENTS, values, pd.Index(np.arange(len(trace)), name="event"))


def _table(
    columns: Sequence[Column], rows: Sequence[object], index: str = "", **given: list[Any]
) -> pd.DataFrame:
    """The rows' attributes, but for columns that are given, indexed by one of them or by place."""
    import pandas as pd  # noqa: PLC0415

    names = [column.name for column in columns]
    values = {name: given.get(name) or [getattr(row, name) for row in rows] for name in names}
    labels = [getattr(row, index) for row in rows] if index else range(len(rows))
    return _typed(columns, values, pd.Index(labels, name=index or "place"))


def _typed(columns: Sequence[Column], values: Mapping[str, Any], index: pd.Index) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415

    types = {column.name: column.dtype for column in columns}
    frame: pd.DataFrame = pd.DataFrame(values).astype(types).set_axis(index)
    return frame


def _parts(signature: str) -> tuple[str | None, str | None]:
    """Shapes and types: the first two of some JSON values, one behind the other."""
    decoder, begin = json.JSONDecoder(), 0
    parts: list[str | None] = []
    while begin < len(signature) and len(parts) < 2:
        try:
            end = decoder.raw_decode(signature, begin)[1]
        except (ValueError, RecursionError):
            end = len(signature)
        parts.append(signature[begin:end])
        begin = end
    shapes, types, *_ = (*parts, None, None)
    return shapes, types


def _stack(checkpoints: Sequence[Checkpoint]) -> str:
    """``fsdp-wrapper non-reentrant > hf-gradient-checkpointing reentrant``."""
    return " > ".join(
        " ".join(filter(None, (one.mechanism, one.variant))) or "checkpoint" for one in checkpoints
    )


PathLike = str | os.PathLike[str]


def analyze(
    traces: PathLike | Iterable[PathLike], *, workers: int = 1, dask: str | None = None
) -> Scan:
    """Analyze traces.

    Args:
        traces: A trace file, a folder with one per rank, a remote address (``s3://…``), or
            several of these.
        workers: Processes that read the ranks. With more than one, guard your script with
            ``if __name__ == "__main__"``: they import it.
        dask: Address of a Dask scheduler, or its scheduler file; its workers read the ranks.

    Raises:
        InputError: Nothing could be read; its text says why and what to try.
        UsageError: The scheduler does not answer (``E219``), or Dask is not installed (``E201``).
    """
    paths = [traces] if isinstance(traces, (str, os.PathLike)) else list(traces)
    found = tuple(newest_run(os.fspath(path)) for path in paths)
    return Scan(analyse(found, workers=Workers(workers, dask)), found)


def compare(before: PathLike | Scan, after: PathLike | Scan) -> Comparison:
    """Compare two runs.

    Args:
        before: A scan, a run's folder, a trace or a folder of traces, or a ``result.json``.
        after: The same, of the later run.

    Raises:
        InputError: One of them could not be read.
    """
    (one, first), (other, second) = _named("before", before), _named("after", after)
    return compare_results(one, other, (first, second))


def load_result(path: PathLike) -> Scan:
    """Load a result (``result.json``).

    Raises:
        InputError: It is no such document.
        OSError: It cannot be read.
    """
    return Scan(from_json(content(Path(path), held=True)))


def _named(name: str, given: PathLike | Scan) -> tuple[Result, str]:
    if isinstance(given, Scan):
        return given.result, name
    return result_at(newest_run(os.fspath(given))), os.fspath(given)


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

        Columns: :data:`recompute_scan.api.EVENTS`. Times are ns on the trace's own
        clock. Python frames are not in it.
        """
        return event_table(self.columns)


@dataclass(frozen=True)
class Scan:
    """The answer about one run; Jupyter displays it.

    Attributes:
        result: All data; its classes are in :mod:`recompute_scan.result`.
        traces: Paths of its traces; empty for a loaded result.
        keeps: Objects to keep alive, such as a temporary folder.
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
        """Highest recompute count per backward pass."""
        return self.result.recompute_per_backward

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The problems found."""
        return self.result.findings

    @property
    def cost(self) -> Cost | None:
        """Cost of the recomputes in ms; ``None`` if the trace does not show it."""
        return self.result.cost

    @property
    def regions(self) -> pd.DataFrame:
        """One row per block, in forward order, indexed by ``ordinal`` (0, 1, …).

        Columns: :data:`recompute_scan.api.REGIONS`. Times are ms, per step.
        """
        found = self.result.regions
        stacks = [_stack(region.checkpoints) for region in found]
        return _table(REGIONS, found, "ordinal", checkpoints=stacks)

    @property
    def families(self) -> pd.DataFrame:
        """One row per family of operators, indexed by ``family`` (text).

        Columns: :data:`recompute_scan.api.FAMILIES`. Counts and times (ms) are per
        step.
        """
        return _table(FAMILIES, self.result.families, "family")

    @property
    def work(self) -> pd.DataFrame:
        """One row per group of operators that a step could do without, most time first.

        Columns: :data:`recompute_scan.api.WORK`. Times are ms, per step. Without a row
        where the recording watched no step (``run --work``).
        """
        step = self.result.watched
        return _table(WORK, step.work if step else ())

    @property
    def memory(self) -> pd.DataFrame:
        """One row per group of memory that a step keeps longer than needed, largest first.

        Columns: :data:`recompute_scan.api.MEMORY`. Without a row where the recording
        watched no step (``run --work``).
        """
        step = self.result.watched
        return _table(MEMORY, step.kept if step else ())

    @cached_property
    def trace(self) -> Events:
        """Trace of the lowest recorded rank, read when first needed.

        Raises:
            InputError: It can no longer be read, or there is none (``E308``).
        """
        return self.trace_of()

    def trace_of(self, rank: int | None = None) -> Events:
        """Trace of one rank, read again.

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
        """One layer's operators in the forward pass and in each recompute."""
        return timeline_figure(self.result)

    def cost_figure(self) -> go.Figure:
        """Where a step's time goes, before and after the fix."""
        return cost_figure(self.result)

    def regions_figure(self) -> go.Figure:
        """Recomputes of each layer in forward order, with the redundant ones."""
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
        from recompute_scan.report.render import render_html  # noqa: PLC0415

        return render_html(self.result)

    def to_markdown(self) -> str:
        """A summary for an issue tracker."""
        from recompute_scan.report.render import render_markdown  # noqa: PLC0415

        return render_markdown(self.result)

    def _with_traces(self) -> tuple[str, ...]:
        if not self.traces:
            raise InputError(
                "E308", "This result was loaded without its traces.", hint="call analyze() on them"
            )
        return self.traces

    def __repr__(self) -> str:
        many = self.recompute_per_backward
        recomputes = "" if many is None else f", {many:g} recomputes per backward"
        where = f" of {', '.join(self.traces[:2])}{', …' * (len(self.traces) > 2)}"
        return f"<Scan{where * bool(self.traces)}: {self.verdict}{recomputes}>"

    def __str__(self) -> str:
        from recompute_scan.report.render import render_text  # noqa: PLC0415

        return render_text(self.result, color=False)

    def _repr_html_(self) -> str:
        from recompute_scan.report.render import render_brief_html  # noqa: PLC0415

        return render_brief_html(self.result)


_INK, _EDGE, _HATCH = "#1b1f24", "#57606b", "#b3261e"  # the page's, as its fills are
_HEIGHT_OF_ROW = 26
_REDUNDANT = ", redundant"
_NO_RUNS = "No block's runs can be shown operator by operator"
_LONGEST_IN_A_BOX = 14


def label(name: str, limit: int = 60) -> str:
    """A name as plotly text: shortened, unseen characters spelled out, no markup, no LaTeX."""
    return escape(visible(name, limit), quote=False).replace("$", "&#36;")


def _in_a_box(op: ProofOp) -> str:
    name = short_name(op)
    return label(name if len(name) <= _LONGEST_IN_A_BOX else words.family_words(op.family), 30)


def timeline_figure(result: Result) -> go.Figure:
    """One block, run by run: its operators in the forward pass, each recompute and the backward.

    Every lane starts at 0 on one scale in ms; redundant ones are hatched in red. An empty figure
    that says so where the result holds no proof.
    """
    proof = result.proof
    if proof is None or not proof.lanes:
        ran = any(region.recompute_runs_per_backward for region in result.regions)
        return _empty(_NO_RUNS if ran else "No block was seen to run again")
    figure = go.Figure()
    begun = next((step.start_us for step in result.steps if step.index == proof.step), None)
    lanes = [
        f"{place + 1}. {label(lane.label)}{_REDUNDANT * (lane.kind == 'redundant')}"
        for place, lane in enumerate(proof.lanes)
    ]
    for family, colour in family_colours(proof).items():
        figure.add_bar(**_bars(proof, family, colour, lanes, begun))
    again = sum(lane.kind in ("recompute", "redundant") for lane in proof.lanes)
    region = next((item for item in result.regions if item.ordinal == proof.region), None)
    name = label(block_label(region)) if region else f"block {proof.region}"
    figure.update_layout(barmode="overlay", height=180 + 2 * _HEIGHT_OF_ROW * len(lanes))
    figure.update_layout(uniformtext={"minsize": 9, "mode": "hide"})
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=lanes[::-1])
    title = f"{name}: one forward pass and {units.plural(again, 'recompute')} of it in step"
    return _finish(figure, f"{title} {proof.step}", "ms since the start of each run")


def _bars(
    proof: Proof, family: str, colour: int, lanes: Sequence[str], begun: float | None
) -> dict[str, Any]:
    """The bars of one family's operators, each in its lane; redundant ones are hatched."""
    found = [
        (name, lane, op)
        for name, lane in zip(lanes, proof.lanes, strict=True)
        for op in lane.ops
        if op.family == family
    ]

    def told(op: ProofOp) -> list[str]:
        into = "" if begun is None else f", {units.ms((op.start_us - begun) / 1000)} into the step"
        return [label(op.name, 100), units.ms(op.duration_us / 1000), into]

    return {
        "orientation": "h",
        "name": label(words.family_words(family), 30),
        "y": [name for name, _, _ in found],
        "base": [(op.start_us - lane.start_us) / 1000 for _, lane, op in found],
        "x": [op.duration_us / 1000 for _, _, op in found],
        "text": [_in_a_box(op) for _, _, op in found],
        "textposition": "inside",
        "textangle": 0,
        "insidetextanchor": "middle",
        "customdata": [told(op) for _, _, op in found],
        "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}%{customdata[2]}<extra></extra>",
        "marker": {
            "color": FAMILY_FILLS[min(colour, COLOURS - 1)],
            "line": {"color": _EDGE, "width": 0.7},
            "pattern": {
                "shape": ["/" * (lane.kind == "redundant") for _, lane, _ in found],
                "fgcolor": _HATCH,
                "fillmode": "overlay",
                "size": 7,
                "solidity": 0.35,
            },
        },
    }


def cost_figure(result: Result) -> go.Figure:
    """Where one step's time goes, in ms: now, and after the fix where one saves time."""
    bars = cost_bars(result)
    if result.cost is None or bars is None:
        return _empty("The parts of a step are not known")
    rows = {"after the fix": bars.after, "now": bars.before}
    shown = [name for name, parts in rows.items() if parts]
    scale = result.cost.step_ms / sum(part.width for part in bars.before) if bars.before else 0.0
    figure = go.Figure()
    for kind in PARTS:
        widths = {
            name: next((part.width for part in rows[name] if part.kind == kind), 0.0)
            for name in shown
        }
        figure.add_bar(
            orientation="h",
            name=words.PART_WORDS[kind],
            y=shown,
            x=[widths[name] * scale for name in shown],
            marker={"color": PART_FILLS[kind], "line": {"color": _EDGE, "width": 0.7}},
            hovertemplate="%{fullData.name}: %{x:.3f} ms<extra>%{y}</extra>",
        )
    figure.update_layout(barmode="stack", height=260, legend={"traceorder": "normal"})
    figure.update_yaxes(type="category")
    title = summary.fix_sentence(result) or f"A step takes {units.ms(result.cost.step_ms)}"
    return _finish(figure, title, "ms in one step")


def regions_figure(result: Result) -> go.Figure:
    """How often each block ran again in its backward pass, in forward order."""
    if not result.regions:
        return _empty("No block was found in this trace")
    figure = go.Figure()
    places = list(range(len(result.regions)))
    recomputes = [region.recompute_runs_per_backward for region in result.regions]
    needed = [min(value, 1.0) for value in recomputes]
    rows = [
        [
            label(block_label(region), 100),
            units.times(region.recompute_runs_per_backward),
            units.ms(region.recompute_ms_per_step),
            units.ms(region.redundant_ms_per_step),
        ]
        for region in result.regions
    ]
    redundant = [value - first for value, first in zip(recomputes, needed, strict=True)]
    for name, kind, values in (
        ("first recompute", "recompute", needed),
        ("redundant", "redundant", redundant),
    ):
        figure.add_bar(
            name=name,
            x=places,
            y=values,
            customdata=rows,
            marker={"color": PART_FILLS[kind], "line": {"color": _EDGE, "width": 0.7}},
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} recomputes per backward pass"
            "<br>%{customdata[2]} in recomputes, %{customdata[3]} redundant per "
            "step<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=360, bargap=0.15)
    figure.update_yaxes(title_text="recomputes per backward pass", rangemode="tozero")
    if len(places) <= 40:
        texts = [label(block_label(region), 30) for region in result.regions]
        figure.update_xaxes(tickmode="array", tickvals=places, ticktext=texts)
    highest = units.times(max(recomputes))
    return _finish(figure, f"Recomputes of each block: up to {highest}", "block, in forward order")


def _finish(figure: go.Figure, title: str, across: str) -> go.Figure:
    figure.update_layout(
        title={"text": title},
        template="plotly_white",
        font={"color": _INK},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        margin={"l": 20, "r": 20, "t": 90, "b": 20},
    )
    figure.update_xaxes(title_text=across)
    figure.update_yaxes(automargin=True)
    return figure


def _empty(text: str) -> go.Figure:
    figure: Any = go.Figure()
    figure.update_layout(title={"text": text}, template="plotly_white", height=160)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure
