"""How a run failed, for people: what was raised or where the ranks hang, and known causes."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.crash import Crash, RankEnd
from recompute_scan.report.escape import lines, visible
from recompute_scan.report.page import Page
from recompute_scan.result import Finding, Result

ENDING_WORDS = {
    "raised": "raised an exception",
    "exited": "ended itself with a failure",
    "hung": "made no progress",
    "killed": "was ended from outside",
    "ended": "ended well",
}
KIND_WORDS = {"raised": "failed", "exited": "failed", "hung": "hung", "killed": "killed"}
UNKNOWN_CAUSE = "This is none of the failures that recompute-scan knows."
_MEMORY_WORDS = {
    "cuda_allocated": "on the GPU, in use",
    "cuda_peak": "on the GPU, at most",
    "cuda_reserved": "on the GPU, reserved by torch",
    "cuda_free": "on the GPU, free",
    "cuda_total": "on the GPU, in all",
    "host_peak": "in the process, at most",
}
_MOST_RANKS = 16


def failure_text(page: Page, result: Result) -> None:
    """The failure, its cause, and what the first rank to fail knew; nothing without a crash."""
    crash = result.crash
    if crash is None:
        return
    page.written.append(page.style(f"Run: {KIND_WORDS[crash.kind]}", fg="red"))
    page.prose(crash.headline, "", bold=True)
    unknown = not result.findings or not is_crash_finding(result.findings[0])
    if unknown and crash.kind != "killed":
        page.prose(UNKNOWN_CAUSE, "")
    if len(crash.ranks) > 1:
        page.title("Ranks")
        for end in crash.ranks[:_MOST_RANKS]:
            page.prose(rank_words(end), "    ", "  ")
    first = first_end(crash)
    state = state_words(first) if first is not None else []
    if state:
        page.title("At that moment")
        for label, value in state:
            page.prose(f"{label}: {value}", "    ", "  ")


def known_failure_text(page: Page, finding: Finding) -> None:
    """Why it happened and what shows it, below a finding's title."""
    page.prose(f"Why: {finding.detail}", "       ", "  ")
    page.prose("What shows it:")
    for item in finding.evidence:
        page.prose(f"- {visible(item, 400)}", "      ", "    ")


def explanation(
    findings: Sequence[Finding], hints: Sequence[Finding], first: str | None, *, color: bool
) -> str:
    """What ``explain`` prints for a log: the cause, what else it shows, where to read more.

    Args:
        findings: The cause, where it is known.
        hints: What is only worth knowing.
        first: The failure that came first, in one line, or ``None`` where the log has none.
        color: Whether to use ANSI codes.
    """
    page = Page(color)
    if first is None and not findings:
        page.prose("No exception and no timeout was found in this text.", "", bold=True)
    elif not findings:
        page.prose(f"First failure: {visible(first or '', 400)}", "", bold=True)
        page.prose(UNKNOWN_CAUSE, "")
    for finding in findings:
        _explained(page, finding)
    for finding in hints:
        page.title("Also seen; nothing shows that it ended the run")
        _explained(page, finding)
    codes = list(dict.fromkeys(finding.code for finding in (*findings, *hints)))
    if codes:
        page.title("Read more")
        for code in codes:
            page.verbatim(f"recompute-scan explain {code}", "  ")
    return "\n".join(page.written).strip("\n") + "\n"


def _explained(page: Page, finding: Finding) -> None:
    head = f"{finding.code} {finding.name} ({finding.severity}, {finding.confidence} confidence)"
    page.prose(head, "", fg="red" if finding.severity == "error" else "yellow")
    page.prose(finding.title, "", bold=True)
    known_failure_text(page, finding)
    if finding.fix is not None:
        page.prose(f"Fix: {finding.fix.summary}", "       ", "  ", bold=True)


def is_crash_finding(finding: Finding) -> bool:
    """Is this a finding on a failure, rather than on what a trace shows?"""
    return finding.code.startswith(("RS1", "RS2"))


def first_end(crash: Crash) -> RankEnd | None:
    """The rank that the headline speaks of, else the first that hangs."""
    for end in crash.ranks:
        if end.rank == crash.rank if crash.kind != "hung" else end.ending == "hung":
            return end
    return None


def rank_words(end: RankEnd) -> str:
    """``rank 1: raised an exception at train.py:31 (RuntimeError: …)``."""
    where = f" at {visible(end.place, 200)}" if end.place else ""
    what = f" ({visible(_begun(end.errors[-1].summary), 200)})" if end.errors else ""
    return f"rank {end.rank}: {ending_words(end)}{where}{what}"


def ending_words(end: RankEnd) -> str:
    """How a rank ended; of one that was killed outright there is no stack."""
    if end.ending == "killed" and not end.stack:
        return "ended without a word"
    return ENDING_WORDS[end.ending]


def _begun(text: str) -> str:
    return text if len(text) <= 120 else text[:120] + "…"


def state_words(end: RankEnd) -> list[tuple[str, str]]:
    """What the rank knew when it failed: steps made, memory, models and their checkpoints."""
    found = []
    if end.steps is not None:
        found.append(("Optimizer steps made", str(end.steps)))
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


def traceback_lines(crash: Crash) -> list[str]:
    """The traceback, harmless, its middle left out where it is very long."""
    found = lines(crash.traceback or "")
    return found if len(found) <= 400 else [*found[:200], "…", *found[-200:]]
