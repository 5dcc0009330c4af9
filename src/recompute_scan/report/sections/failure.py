"""How a run failed: what was raised or where the ranks hang, and the cause where it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.crash import Crash, RankEnd
from recompute_scan.report.escape import lines, markdown_fence, markdown_prose, visible
from recompute_scan.report.finding_words import (
    UNKNOWN_CAUSE,
    finding_anchors,
    finding_text,
    is_crash_finding,
)
from recompute_scan.report.page import Page
from recompute_scan.report.section import Section
from recompute_scan.report.summary import what_was_measured
from recompute_scan.report.words import KIND_WORDS
from recompute_scan.result import Finding, Result

_ENDING_WORDS = {
    "raised": "raised an exception",
    "exited": "ended itself with a failure",
    "hung": "made no progress",
    "killed": "was ended from outside",
    "ended": "ended well",
}
_MEMORY_WORDS = {
    "cuda_allocated": "on the GPU, in use",
    "cuda_peak": "on the GPU, peak",
    "cuda_reserved": "on the GPU, reserved by torch",
    "cuda_free": "on the GPU, free",
    "cuda_total": "on the GPU, in all",
    "host_peak": "of the process, peak",
}
_MOST_RANKS = 16


def _cause(result: Result) -> Finding | None:
    """The finding on the failure, which is the first where there is one."""
    first = next(iter(result.findings), None)
    return first if first is not None and is_crash_finding(first) else None


def _first_end(crash: Crash) -> RankEnd | None:
    """The rank that the headline speaks of, else the first that hangs."""
    for end in crash.ranks:
        if end.rank == crash.rank if crash.kind != "hung" else end.ending == "hung":
            return end
    return None


def _rank_words(end: RankEnd) -> str:
    """``rank 1: raised an exception at train.py:31 (RuntimeError: …)``."""
    where = f" at {visible(end.place, 200)}" if end.place else ""
    what = f" ({visible(_begun(end.errors[-1].summary), 200)})" if end.errors else ""
    return f"rank {end.rank}: {_ending_words(end)}{where}{what}"


def _ending_words(end: RankEnd) -> str:
    """How a rank ended; of one that was killed outright there is no stack."""
    if end.ending == "killed" and not end.stack:
        return "ended without a word"
    return _ENDING_WORDS[end.ending]


def _begun(text: str) -> str:
    return text if len(text) <= 120 else text[:120] + "…"


def _state_words(end: RankEnd | None) -> list[tuple[str, str]]:
    """What the rank knew when it failed: steps completed, memory, models and their checkpoints."""
    if end is None:
        return []
    found = []
    if end.steps is not None:
        found.append(("Optimizer steps completed", str(end.steps)))
    for variant, number in (end.regions or {}).items():
        found.append((f"Calls of {variant} checkpoints", f"{number:,}"))
    for name, number in (end.memory or {}).items():
        found.append((f"Memory {_MEMORY_WORDS.get(name, name)}", f"{number / 2**20:,.0f} MiB"))
    for model in end.models:
        parts = [f"{model.parameters:,} parameters, {model.trainable:,} trainable"]
        parts += [*model.parallel, *(model.checkpoints or ("no activation checkpoint seen",))]
        if model.use_cache is not None:
            parts.append(f"use_cache={model.use_cache}")
        found.append((f"Model {visible(model.name, 60)}", visible("; ".join(parts), 600)))
    return found


def _traceback_lines(crash: Crash) -> list[str]:
    """The traceback, harmless, its middle left out where it is very long."""
    found = lines(crash.traceback or "")
    return found if len(found) <= 400 else [*found[:200], "…", *found[-200:]]


def _html(result: Result) -> Mapping[str, Any]:
    crash = result.crash
    assert crash is not None
    return {
        "crash": crash,
        "kind": KIND_WORDS[crash.kind],
        "measured": what_was_measured(result),
        "cause": _cause(result),
        "unknown_cause": UNKNOWN_CAUSE,
        "anchors": finding_anchors(result.findings),
        "ending_words": _ending_words,
        "state": _state_words(_first_end(crash)),
        "traceback": _traceback_lines(crash),
    }


def _text(page: Page, result: Result) -> None:
    crash = result.crash
    assert crash is not None
    page.written.append(page.style(f"Run: {KIND_WORDS[crash.kind]}", fg="red"))
    page.prose(crash.headline, "", bold=True)
    if _cause(result) is None and crash.kind != "killed":
        page.prose(UNKNOWN_CAUSE, "")
    if len(crash.ranks) > 1:
        page.title("Ranks")
        for end in crash.ranks[:_MOST_RANKS]:
            page.prose(_rank_words(end), "    ", "  ")
    if state := _state_words(_first_end(crash)):
        page.title("At that moment")
        for label, value in state:
            page.prose(f"{label}: {value}", "    ", "  ")
    for finding in filter(is_crash_finding, result.findings):
        finding_text(page, finding)
    page.written.append("")


def _markdown(result: Result) -> str:
    crash = result.crash
    assert crash is not None
    written = [f"### Run: {KIND_WORDS[crash.kind]}", markdown_prose(crash.headline[:1000])]
    if len(crash.ranks) > 1:
        ends = crash.ranks[:_MOST_RANKS]
        written.append("\n".join(f"- {markdown_prose(_rank_words(end))}" for end in ends))
    state = _state_words(_first_end(crash))
    written.append("\n".join(f"- {markdown_prose(f'{label}: {value}')}" for label, value in state))
    if crash.traceback:
        written.append(markdown_fence("\n".join(_traceback_lines(crash)), "text"))
    return "\n\n".join(part for part in written if part)


SECTION = Section(
    anchor="crash",
    title="How the run failed",
    template="failure.html",
    present=lambda result: result.crash is not None,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Failure",
)
