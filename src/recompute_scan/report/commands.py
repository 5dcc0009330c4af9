"""What a reader is told to do, as text to copy: commands to run, and diffs to take.

A script's name came with the result, and people paste what a report tells them to run: a name that
a shell would read more into is never repeated.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from recompute_scan.report.escape import lines
from recompute_scan.result import Result
from recompute_scan.result.recompute import DOUBLED
from recompute_scan.units import is_before

_PLAIN_SCRIPT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@%+-]{0,300}\.py")
_OWN = "train.py"
_WHOLE_STEP = (
    "Record at least one whole training step, forward and backward pass, with operator events on. "
    "This does so with your script unchanged; in torch.profiler code of your own, keep "
    "ProfilerActivity.CPU among the activities and let the schedule record two whole steps."
)
_NO_MORE = (
    "The recording has whole steps with an annotation around each checkpointed call, so another "
    "one would say no more. What checkpointing costs can be measured all the same: this command "
    "runs the script with it and without."
)
_RANGES = (
    "Record at least one whole training step, forward and backward pass, with a range for each "
    "operator: this option makes them. An nsys without it needs the loop inside "
    "torch.autograd.profiler.emit_nvtx(record_shapes=True), which is what the option does. "
    "`recompute-scan run` needs no nsys."
)
_NSYS = "nsys profile --trace=cuda,nvtx --pytorch=autograd-shapes-nvtx python"
_GRAPHS = (
    "What compiled code recomputes is in the graphs of torch.compile, not in the trace. This "
    "command keeps them, on torch 2.10 and newer."
)
# Since this version graphs name checkpoints (https://github.com/pytorch/pytorch/pull/167735).
_NAMED_SINCE = "2.10"
_OLD = (
    "The graphs of torch.compile do not name checkpoints before torch 2.10. Record with torch 2.10 "
    "or newer. Only where that is no choice, record without the compiler: checkpoints nest in the "
    "same way, and each of them can be counted."
)
_UNREADABLE = (
    "The graphs of torch.compile are not here, as where the script calls logging.disable(), or do "
    "not tell. Without the compiler checkpoints nest in the same way, and each of them can be "
    "counted."
)


class ToRecord(Struct, frozen=True):
    """What to record where a trace could not tell, and the command that does."""

    why: str
    command: str


def script_of(result: Result) -> str | None:
    """The script that was recorded; ``None`` where it is not known or not plain."""
    target = result.environment.get("target", "")
    return target if _PLAIN_SCRIPT.fullmatch(target) else None


def recorded_into(result: Result, suffix: str = "") -> str:
    """The folder that `run` records the script into unless it is given another."""
    return f"recompute-scan-out/{Path(script_of(result) or _OWN).stem}{suffix}"


def fix_is_measurable(result: Result) -> bool:
    """Whether ``--verify`` has a fix to try: one that takes out a checkpoint which costs time."""
    return any(
        finding.fix is not None
        and finding.fix.removes is not None
        and (finding.saving_ms or (finding.code == DOUBLED and finding.saving_ms is None))
        for finding in result.findings
    )


def run_command(result: Result, output: str = "", *, verify: bool = False) -> str:
    """The command that records the script again, without the script's own arguments."""
    before, into = "--verify " * verify, f" -o {output}" if output else ""
    return f"recompute-scan run {before}--steps 5{into} {script_of(result) or _OWN}"


def how_to_record(result: Result) -> ToRecord:
    """What gives an answer where this trace has none."""
    if "compiled" in (result.reason or ""):
        if result.environment.get("torch_compile") != "used":  # not recorded by `run`
            return ToRecord(_GRAPHS, run_command(result))
        old = is_before(result.environment.get("torch", ""), _NAMED_SINCE)
        why = _OLD if old else _UNREADABLE
        return ToRecord(why, f"TORCH_COMPILE_DISABLE=1 {run_command(result)}")
    if result.environment.get("profiler", "").startswith("Nsight Systems"):
        return ToRecord(_RANGES, f"{_NSYS} {script_of(result) or _OWN}")
    if result.evidence_level == "annotated" and any(step.complete for step in result.steps):
        command = f"recompute-scan run --verify --without-checkpointing {script_of(result) or _OWN}"
        return ToRecord(_NO_MORE, command)
    return ToRecord(_WHOLE_STEP, run_command(result))


class DiffLine(Struct, frozen=True):
    """One line of a diff: ``kind`` is ``add``, ``del``, ``hunk``, ``file`` or ``same``."""

    kind: str
    text: str


def diff_lines(diff: str) -> list[DiffLine]:
    """The lines with their kinds; the text itself is not changed."""
    return [DiffLine(_kind(line), line) for line in lines(diff.rstrip("\n"))]


def _kind(line: str) -> str:
    if line.startswith(("+++", "---", "diff ", "index ")):
        return "file"
    if line.startswith("@@"):
        return "hunk"
    return {"+": "add", "-": "del"}.get(line[:1], "same")
