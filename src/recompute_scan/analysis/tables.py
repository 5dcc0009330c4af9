"""Results and traces as pandas tables. What each column holds is data here, and documented from it.

Times of results are ms, of events ns; counts are per step unless a name says otherwise. What is
not known is missing (``NaN``, ``<NA>``), never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from recompute_scan.model import find_steps, nest, step_of
from recompute_scan.result import Checkpoint, Result
from recompute_scan.trace.columns import KIND_NAMES, Ints, Trace

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
    Column("signature", "string", "", "what the block runs, in short: its operators' families"),
    Column("forward_runs_per_step", "float64", "runs", "forward passes through it in one step"),
    Column("recompute_runs_per_backward", "float64", "runs", "recomputes in each backward pass"),
    Column("mean_recompute", "float64", "runs", "the same, weighted by the time of its operators"),
    Column("forward_ms_per_step", "float64", "ms", "time of its forward passes"),
    Column("recompute_ms_per_step", "float64", "ms", "time of all its recomputes"),
    Column("redundant_ms_per_step", "float64", "ms", "time of the recomputes beyond the first"),
    Column("checkpoints", "string", "", "mechanism and variant of each, outermost first, by ` > `"),
)
FAMILIES = (
    Column("kind", "string", "", "`attention`, `gemm`, `norm`, …"),
    Column("forward_per_step", "float64", "calls", "calls in the forward pass"),
    Column("recomputed_per_step", "float64", "calls", "calls in recomputes"),
    Column("backward_per_step", "float64", "calls", "calls of the backward formula"),
    Column("recompute_ms_per_step", "float64", "ms", "time of its recomputes"),
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


def region_table(result: Result) -> pd.DataFrame:
    """One row a block, in forward order, indexed by ``ordinal``; columns: :data:`REGIONS`."""
    values = {
        column.name: [getattr(region, column.name) for region in result.regions]
        for column in REGIONS
        if column.name != "checkpoints"
    }
    values["checkpoints"] = [_stack(region.checkpoints) for region in result.regions]
    ordinals = np.array([region.ordinal for region in result.regions], np.int64)
    return _table(REGIONS, values, "ordinal", ordinals)


def family_table(result: Result) -> pd.DataFrame:
    """One row a family of operators, indexed by ``family``; columns: :data:`FAMILIES`."""
    values = {
        column.name: [getattr(family, column.name) for family in result.families]
        for column in FAMILIES
    }
    return _table(FAMILIES, values, "family", [family.family for family in result.families])


def event_table(trace: Trace) -> pd.DataFrame:
    """One row an event, in the order of the file, indexed by ``event``; columns: :data:`EVENTS`."""
    import pandas as pd  # noqa: PLC0415 - costs more than most analyses

    def coded(codes: Ints, texts: Sequence[str | None]) -> pd.Categorical:
        # Names may be said twice (of two threads, say), categories may not.
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
    return _table(EVENTS, values, "event", np.arange(len(trace)))


def _table(
    columns: Sequence[Column], values: Mapping[str, Any], index: str, labels: Any
) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415

    rows = pd.Index(labels, name=index)
    frame: pd.DataFrame = pd.DataFrame({column.name: values[column.name] for column in columns})
    typed: pd.DataFrame = frame.astype({column.name: column.dtype for column in columns})
    typed.index = rows
    return typed


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
