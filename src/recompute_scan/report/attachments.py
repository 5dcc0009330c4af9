"""What a reader may take out of the page: a table for a spreadsheet, an excerpt for Perfetto."""

from __future__ import annotations

import csv
import io

import msgspec
from msgspec import Struct

from recompute_scan.result import Proof, Result
from recompute_scan.terminal import inert

# Spreadsheets take a cell that begins so for a formula, whoever wrote it.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

_COLUMNS = (
    "ordinal",
    "module",
    "module_class",
    "forward_runs_per_step",
    "recompute_runs_per_backward",
    "mean_recompute",
    "forward_ms_per_step",
    "recompute_ms_per_step",
    "redundant_ms_per_step",
)


class Attachments(Struct, frozen=True):
    """The result in the forms that the page hands out; ``json`` is ``None`` where too large."""

    markdown: str
    csv: str
    json: str | None


def regions_csv(result: Result) -> str:
    """The table of blocks as CSV, a header line first; text can start no formula.

    Numbers are as the result has them (ms, runs); ``checkpoints`` are ``variant call site``,
    outermost first, separated by `` > ``.
    """
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow((*_COLUMNS, "checkpoints"))
    for region in result.regions:
        asked = " > ".join(
            " ".join(part for part in (each.variant, each.call_site) if part)
            for each in region.checkpoints
        )
        table.writerow([cell(getattr(region, name)) for name in _COLUMNS] + [cell(asked)])
    return written.getvalue()


def cell(value: object) -> object:
    """A value as a CSV cell: text is made visible and can start no formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    shown = inert(value)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def proof_trace(proof: Proof) -> str:
    """The enlarged block as a trace that Perfetto and chrome://tracing open.

    Each lane is a thread of its own, in the order of the page; times are the recorded trace's
    own, in µs. The format is Chrome's Trace Event Format.
    """
    events: list[dict[str, object]] = []
    for number, lane in enumerate(proof.lanes):
        place = {"pid": 1, "tid": number + 1}
        events.append(
            {"ph": "M", "name": "thread_name", **place, "args": {"name": inert(lane.label)}}
        )
        events.append(
            {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}}
        )
        events.extend(
            {
                "ph": "X",
                "name": inert(op.name),
                "cat": inert(op.family),
                **place,
                "ts": op.start_us,
                "dur": op.duration_us,
            }
            for op in lane.ops
        )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}).decode()
