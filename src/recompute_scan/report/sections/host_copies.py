"""What goes between host and device in a step, whether activations do, and what runs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.escape import markdown_prose, visible
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section, analysed
from recompute_scan.result import HostCopies, HostCopy, Result
from recompute_scan.units import count, ms, pct, size

_TITLE = "Copies between host and device"
# Of the step, in %: a saving of less is one that `--verify` takes for small.
_MATTERS = 5.0
_DIRECTIONS = {"to-host": "to the host", "to-device": "to the device"}
_MEMORIES = {"pinned": "pinned", "pageable": "pageable", "unknown": "not known"}
_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "rest": "optimizer and the rest",
    "unknown": "not known",
}


def _offload_words(copies: HostCopies) -> str:
    if copies.offload == "none":
        return "No offload of activations was seen."
    if copies.offload == "untold":
        reason = f" {visible(copies.reason, 300)}" if copies.reason else ""
        return f"Whether activations are offloaded is not told.{reason}"
    return (
        f"Activations are offloaded: in each step {size(copies.offloaded_bytes)} go to the host in "
        "the forward passes and come back in the backward passes."
    )


def _alone_words(copies: HostCopies) -> str:
    whole = f"{pct(copies.alone_pct)} of a step" if copies.steps else "of the recording"
    return (
        f"Copies run for {ms(copies.alone_ms)} ({whole}) in which no kernel of the same device "
        "does: as far as a trace can tell, they are on the critical path then."
    )


def _matter(copies: HostCopies) -> bool:
    return copies.alone_pct is not None and copies.alone_pct > _MATTERS


def _remark(copies: HostCopies) -> str:
    """What to try against copies that nothing runs beside."""
    worst = max(copies.copies, key=lambda one: one.alone_ms)
    offloads = copies.offload == "seen" and worst.phase in ("forward", "backward")
    if worst.memory == "pageable":
        how = "`save_on_cpu(pin_memory=True)`" if offloads else "`DataLoader(pin_memory=True)`"
        tried = (
            f"pinned host memory ({how} and the like, copied with `non_blocking=True`), as a copy "
            "from or to pageable memory holds up the thread that asks for it"
        )
    elif not worst.own_stream:
        with_one = ", as torchtune's `OffloadActivations(use_streams=True)` has" if offloads else ""
        tried = f"a stream of their own{with_one}, so that kernels run beside them"
    else:
        tried = "to begin them earlier, as they are on a stream of their own already"
    instead = "; or recompute these activations instead" if offloads else ""
    return f"Worth a try, and not measured: {tried}{instead}."


def _sentences(copies: HostCopies) -> list[str]:
    said = [_offload_words(copies)]
    if copies.copies:
        said.append(_alone_words(copies))
    if copies.copies and _matter(copies):
        said.append(_remark(copies))
    return said


def _row(one: HostCopy) -> tuple[str, ...]:
    return (
        _DIRECTIONS[one.direction],
        _MEMORIES[one.memory],
        _PHASES[one.phase],
        count(one.count),
        size(one.bytes),
        ms(one.time_ms),
        ms(one.alone_ms),
    )


def _html(result: Result) -> Mapping[str, Any]:
    copies = result.host_copies
    assert copies is not None
    return {
        "sentences": _sentences(copies),
        "rows": [_row(one) for one in copies.copies],
        "each": "per step" if copies.steps else "in the recording",
    }


def _worth_saying(result: Result) -> HostCopies | None:
    """The copies, where a person should hear of them without asking."""
    copies = result.host_copies
    if copies is None or not copies.copies:
        return None
    undecided = copies.offload == "untold" and copies.steps > 0
    return copies if copies.offload == "seen" or undecided or _matter(copies) else None


def _text(page: Page, result: Result) -> None:
    if copies := _worth_saying(result):
        page.title(_TITLE)
        for sentence in _sentences(copies):
            page.prose(sentence.replace("`", ""))


def _markdown(result: Result) -> str:
    copies = _worth_saying(result)
    if copies is None:
        return ""
    said = (f"- {markdown_prose(sentence.replace('`', ''))}" for sentence in _sentences(copies))
    return f"#### {_TITLE}\n\n" + "\n".join(said)


SECTION = Section(
    anchor="copies",
    title=_TITLE,
    template="host_copies.html",
    present=lambda result: (
        analysed(result) and result.host_copies is not None and bool(result.host_copies.copies)
    ),
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Copies",
    help=(
        _TITLE,
        "says whether activations wait on the host, what memory copies there use, and how much of "
        "their time no kernel runs beside them.",
    ),
)
