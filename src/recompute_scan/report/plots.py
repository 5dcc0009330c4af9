"""Plotly figures for notebooks. This is the only module that imports plotly.

Plotly reads a small markup (``<b>``, ``<a href>``, ``<br>``) and LaTeX between dollar signs in
every label, so each name goes through :func:`label` first.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from recompute_scan import units
from recompute_scan.report import summary, words
from recompute_scan.report.bars import PARTS, cost_bars
from recompute_scan.report.escape import visible
from recompute_scan.report.groups import block_label
from recompute_scan.report.side_by_side import COLOURS, family_colours, short_name
from recompute_scan.result import ProofOp, Result

PART_COLOURS = {
    "forward": "#8a97a6",
    "recompute": "#c98e00",
    "redundant": "#b3261e",
    "backward": "#5d6876",
    "optimizer": "#b3bcc7",
    "other": "#dbe0e6",
}
FAMILY_COLOURS = ("#2c62bd", "#12868d", "#a86b34", "#6a4ea5", "#8a941f", "#9aa2ad")
_HEIGHT_OF_ROW = 26
_REDUNDANT = ", redundant"
_NO_RUNS = "No block's runs can be shown operator by operator"
_LONGEST_IN_A_BOX = 14


def label(name: str, limit: int = 60) -> str:
    """A name as plotly text: shortened, unseen characters spelled out, no markup, no LaTeX."""
    quoted = visible(name, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return quoted.replace("$", "&#36;")


def _in_a_box(op: ProofOp) -> str:
    """What is written on an operator: its name, or its family where that is long."""
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
        found = [
            (place, (op.start_us - lane.start_us) / 1000, op)
            for place, lane in enumerate(proof.lanes)
            for op in lane.ops
            if op.family == family
        ]
        figure.add_bar(
            orientation="h",
            name=label(words.family_words(family), 30),
            y=[lanes[place] for place, _, _ in found],
            base=[at for _, at, _ in found],
            x=[op.duration_us / 1000 for _, _, op in found],
            text=[_in_a_box(op) for _, _, op in found],
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            customdata=[
                [
                    label(op.name, 100),
                    units.ms(op.duration_us / 1000),
                    ""
                    if begun is None
                    else f", {units.ms((op.start_us - begun) / 1000)} into the step",
                ]
                for _, _, op in found
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}%{customdata[2]}<extra></extra>",
            marker={
                "color": FAMILY_COLOURS[min(colour, COLOURS - 1)],
                "line": {"color": "white", "width": 0.5},
                "pattern": {
                    "shape": [
                        "/" * (proof.lanes[place].kind == "redundant") for place, _, _ in found
                    ],
                    "fgcolor": PART_COLOURS["redundant"],
                    "fillmode": "overlay",
                    "size": 7,
                    "solidity": 0.35,
                },
            },
        )
    again = sum(lane.kind in ("recompute", "redundant") for lane in proof.lanes)
    region = next((item for item in result.regions if item.ordinal == proof.region), None)
    name = label(block_label(region)) if region else f"block {proof.region}"
    figure.update_layout(barmode="overlay", height=180 + 2 * _HEIGHT_OF_ROW * len(lanes))
    figure.update_layout(uniformtext={"minsize": 9, "mode": "hide"})
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=lanes[::-1])
    title = f"{name}: one forward pass and {units.plural(again, 'recompute')} of it in step"
    return _finish(figure, f"{title} {proof.step}", "ms since the start of each run")


def cost_figure(result: Result) -> go.Figure:
    """Where one step's time goes, in ms: now, and after the fix where one saves time."""
    bars = cost_bars(result)
    if result.cost is None or bars is None:
        return _empty("What a step spends its time on is not known")
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
            marker_color=PART_COLOURS[kind],
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
            marker_color=PART_COLOURS[kind],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} recomputes a backward pass"
            "<br>%{customdata[2]} in recomputes, %{customdata[3]} redundant per "
            "step<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=360, bargap=0.15)
    figure.update_yaxes(title_text="recomputes a backward pass", rangemode="tozero")
    if len(places) <= 40:
        texts = [label(block_label(region), 30) for region in result.regions]
        figure.update_xaxes(tickmode="array", tickvals=places, ticktext=texts)
    highest = units.times(max(recomputes))
    return _finish(figure, f"Recomputes of each block: up to {highest}", "block, in forward order")


def _finish(figure: go.Figure, title: str, across: str) -> go.Figure:
    figure.update_layout(
        title={"text": title},
        template="plotly_white",
        legend={"orientation": "h", "y": -0.35},
        margin={"l": 20, "r": 20, "t": 60, "b": 20},
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
