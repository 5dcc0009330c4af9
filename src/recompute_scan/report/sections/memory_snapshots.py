"""Who held the peak, by a memory snapshot of torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.result import Result
from recompute_scan.result.document import MemorySnapshot
from recompute_scan.units import UNKNOWN, plural, size

_TITLE = "Who holds the peak?"
_KINDS = {
    "kept": "kept by a policy of a selective checkpoint",
    "checkpoint": "made inside checkpointed calls, and not freed with them",
    "recompute": "made by recomputes",
    "forward": "made by modules that are not checkpointed",
    "backward": "made by the backward pass (gradients, workspace)",
    "optimizer": "made by the optimizer",
    "other": "made by other code (weights, inputs)",
    "unknown": "without a stack that tells",
}
_MOST_LINES = 5


def _lead(one: MemorySnapshot) -> str:
    name = visible(one.file, 120)
    kinds = "; ".join(f"{size(n)} {_KINDS.get(kind, kind)}" for kind, n in one.by_kind.items())
    history = "" if one.events else " It has no history: what is shown is its end."
    failed = f" {plural(one.out_of_memory, 'request')} failed." if one.out_of_memory else ""
    return (
        f"{name}, GPU {one.device}: {size(one.peak_bytes)} were in use at the peak, of "
        f"{size(one.reserved_bytes)} reserved at the end.{history}{failed} Of these: {kinds}."
    )


def _rows(one: MemorySnapshot) -> list[tuple[str, str, str, str]]:
    return [
        (each.site or UNKNOWN, _KINDS[each.kind], size(each.bytes), str(each.blocks))
        for each in one.held
    ]


def _html(result: Result) -> Mapping[str, Any]:
    return {"snapshots": [{"lead": _lead(one), "rows": _rows(one)} for one in result.snapshots]}


def _text(page: Page, result: Result) -> None:
    page.title(_TITLE)
    for one in result.snapshots:
        page.prose(_lead(one))
        for site, kind, held, blocks in _rows(one)[:_MOST_LINES]:
            page.prose(f"{held} in {blocks} blocks, {kind}: {visible(site, 160)}", indent="    ")


def _markdown(result: Result) -> str:
    said = "\n".join(f"- {markdown_prose(_lead(one))}" for one in result.snapshots)
    return f"#### {_TITLE}\n\n{said}"


SECTION = Section(
    anchor="snapshots",
    title=_TITLE,
    template="memory_snapshots.html",
    present=lambda result: bool(result.snapshots),
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Snapshots",
    help=(
        _TITLE,
        "is read from a memory snapshot: what was in use when most was, by the line that asked.",
    ),
)
