"""Results where there is no trace: of runs that failed or that only compared a step, of compilers'
logs, of memory snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from recompute_scan._version import __version__
from recompute_scan.analysis.compiler_logs import CompilerLog
from recompute_scan.analysis.confidence import headline
from recompute_scan.compiled.alone import Alone, answer_alone
from recompute_scan.compiled.compiled_answer import graphs_from
from recompute_scan.faithful import SAME, Fidelity, in_words
from recompute_scan.findings.code import CodeEvidence
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.findings.rules import check_code, check_run
from recompute_scan.result import EvidenceLevel, Level, Result, Verdict
from recompute_scan.run_info import RunInfo

_SAYS = (
    "There is no trace beside the compiler's logs: times, how often each graph runs, and all that "
    "was not compiled are unknown."
)
_ONLY_COMPARED = (
    "No step was profiled: recomputes were compared with their forward, and not counted."
)
_SURROUNDED = (
    "The checkpoints around compiled code are those on the stack on which it was compiled first."
)
_UNSURROUNDED = (
    "These logs do not tell whether checkpoints are around compiled code, which would run all of "
    "it once more."
)


def bare_result(
    reason: str | None,
    headline: str,
    *,
    verdict: Verdict = "inconclusive",
    evidence_level: EvidenceLevel = "annotated",
    confidence: Level = "low",
    environment: Mapping[str, str] | None = None,
    warnings: tuple[str, ...] = (),
) -> Result:
    """A result without steps, regions and cost."""
    return Result(
        tool_version=__version__,
        verdict=verdict,
        evidence_level=evidence_level,
        confidence=confidence,
        reason=reason,
        headline=headline,
        recompute_per_backward=None,
        mean_recompute=None,
        recomputed_share=None,
        attention=None,
        steps=(),
        families=(),
        regions=(),
        cost=None,
        findings=(),
        checked=(),
        ranks=(),
        health={},
        environment=dict(environment or {}),
        warnings=warnings,
    )


def result_without_trace(info: RunInfo) -> Result:
    """The result of a run that failed before anything could be recorded."""
    return bare_result(
        # What the record says of missing steps is how recording ended, and not why.
        "The run failed before a step was recorded.",
        "The run failed before a step was recorded: no verdict on checkpointing.",
        environment=info.environment,
        warnings=info.warnings,
    )


def result_of_comparison(info: RunInfo) -> Result:
    """The result of a run that compared recomputes with their forward, and profiled nothing."""
    fidelity = info.fidelity or Fidelity()
    findings, checked = check_run(RunEvidence(fidelity, info.untrained, info.sources))
    bare = bare_result(
        _ONLY_COMPARED,
        f"{SAME} {in_words(fidelity)}",
        environment=info.environment,
        warnings=info.warnings,
    )
    return replace(bare, findings=findings, checked=checked, fidelity=fidelity)


def result_of_log(log: CompilerLog) -> Result:
    """What the graphs in a log come to; times are unknown."""
    graphs = graphs_from(log.records)
    alone = answer_alone(graphs)
    judgement = alone.judgement
    environment = {"torch": graphs.torch} if graphs.torch else {}
    sure = _confidence(alone)
    findings, checked = check_code(CodeEvidence(alone.code, environment, sure))
    warnings = [_SAYS, _SURROUNDED if alone.surrounded else _UNSURROUNDED]
    if log.others:
        warnings.append(f"Of {log.others + 1} logs of this rank in the folder, the last was read.")
    bare = bare_result(
        judgement.reason,
        "",
        verdict=judgement.verdict,
        evidence_level="graphs",
        confidence=sure,
        environment=environment,
        warnings=tuple(warnings),
    )
    result = replace(
        bare,
        recompute_per_backward=judgement.highest,
        mean_recompute=judgement.mean,
        recomputed_share=judgement.share,
        findings=findings,
        checked=checked,
        compiled=alone.code,
    )
    return replace(result, headline=headline(result))


def _confidence(alone: Alone) -> Level:
    """One account, so never ``high``; ``low`` where checkpoints around the code are not known."""
    told = alone.surrounded and alone.judgement.verdict != "inconclusive"
    return "medium" if told else "low"
