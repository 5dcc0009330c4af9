"""What reads things that others wrote, each from any bytes: only our own errors may come out."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path

from recompute_scan.analysis.answer import result_of
from recompute_scan.analysis.confidence import confidence
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.check import Policy, judge
from recompute_scan.check.baseline import parse_baseline
from recompute_scan.diagnose.classify import diagnose_log
from recompute_scan.diagnose.logs import lines_of, read_log
from recompute_scan.diagnose.outcome import finding_of
from recompute_scan.errors import ScanError
from recompute_scan.recompute.facts import study
from recompute_scan.report.finding_words import explanation
from recompute_scan.report.text import render_text
from recompute_scan.result import Result, from_json, to_json
from recompute_scan.run_info import parse_run_info
from recompute_scan.trace import Limits, Trace
from recompute_scan.trace.kineto.parse import read

# Small, so that a bomb is refused before anybody calls it a hang.
LIMITS = Limits(
    inflated_bytes=2**26, ratio=200, ratio_from=2**20, events=200_000, event_bytes=2**24
)

# From an input to a word for what came out; inputs that give new words are worth keeping.
Target = Callable[[bytes], str]


def load(data: bytes) -> Trace:
    """The trace in these bytes."""
    return read(io.BytesIO(data), "fuzzed.json", limits=LIMITS, health={})


def trace(data: bytes) -> str:
    """Read and analyse: what ran again, the verdict, the confidence."""
    facts = study(load(data))
    health = " ".join(sorted(facts.trace.health))
    return f"{facts.judgement.verdict} {confidence(facts)} {health}"


def whole(data: bytes) -> str:
    """The same with price and findings, and the result written: it is the same when read back."""
    result = result_of(load(data))
    assert from_json(to_json(result)) == result
    return _word(result)


def result(data: bytes) -> str:
    """A result that somebody sent, as text, and judged."""
    found = from_json(data)
    render_text(found, color=False)
    judge(found, Policy())
    return _word(found)


def baseline(data: bytes) -> str:
    """A baseline."""
    return f"{min(3, len(parse_baseline(data, 'fuzzed.json')))} accepted"


def run_record(data: bytes) -> str:
    """The run record of a run, with its settings."""
    info = parse_run_info(data, "run-rank0.json")
    return f"{info.status} {bool(info.end)} {bool(info.measured)}"


def archive(data: bytes) -> str:
    """An archive that `bundle` wrote, or a stranger."""
    with tempfile.NamedTemporaryFile(suffix=".zip") as file:
        file.write(data)
        file.flush()
        return _word(analyse([Path(file.name)], limits=LIMITS))


def log(data: bytes) -> str:
    """The log of a run that failed, and what is said of it."""
    found = diagnose_log(read_log(lines_of(io.BytesIO(data))))
    causes = [finding_of(found.cause)] if found.cause else []
    explanation(
        causes,
        [finding_of(hint) for hint in found.hints],
        found.first.errors[-1].summary if found.first else None,
        color=False,
    )
    return f"{[cause.code for cause in causes]} {len(found.hints)} {bool(found.first)}"


TARGETS: dict[str, Target] = {
    "trace": trace,
    "whole": whole,
    "result": result,
    "baseline": baseline,
    "run_record": run_record,
    "archive": archive,
    "log": log,
}


def outcome(target: str, data: bytes) -> str:
    """What one input leads to; any exception but a :class:`ScanError` is a bug, and comes out."""
    try:
        return TARGETS[target](data)
    except ScanError as error:
        return error.code


def _word(result: Result) -> str:
    return f"{result.verdict} {result.confidence} {' '.join(sorted(result.health))}"
