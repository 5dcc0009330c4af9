"""What a rule is, what it answers, and the words that several rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from recompute_scan.advise import place, title_of
from recompute_scan.findings.code import CodeEvidence
from recompute_scan.findings.evidence import Evidence, RankEvidence, RunEvidence
from recompute_scan.result import Checkpoint, Finding, Fix, Level, Region

Severity = Literal["error", "warning", "info"]

_MOST_BLOCKS = 3


class NotApplicable(Struct, frozen=True):
    """The rule could not look: why, one sentence."""

    why: str


Answer = list[Finding] | NotApplicable

NO_TRACE = "There is no trace."
NO_GRAPHS = "Nothing is compiled, or the compiler's graphs are not here."


def from_code(evidence: Evidence) -> Answer:
    """The check of a rule on compiled code, which ``check_code`` looks at; never asked."""
    return NotApplicable(NO_GRAPHS)


def needs_ranks(_: Evidence) -> Answer:
    """The check of a rule on what only several ranks together show."""
    return NotApplicable("The traces of two or more ranks are needed.")


class Rule(Struct, frozen=True):
    """One rule: what it is called, how it looks, and what others may ask of it.

    Attributes:
        code: Never changes its meaning, and is never used again.
        name: Of the bad state.
        check: Looks at one trace.
        check_ranks: Looks at several ranks together, after their own results are there.
        check_code: Looks at compiled code, with a trace or without.
        check_run: Looks at what the run itself saw, with a trace or without.
        severity: Of its findings, unless one says otherwise.
        needs: What has to be there for ``check`` or ``check_run`` to be asked.
        gives_plan: Whether its finding recommends the memory plan that the result has chosen.
        wrong_gradients: Whether its findings say that checkpointing changes what is trained.
    """

    code: str
    name: str
    check: Callable[[Evidence], Answer] = needs_ranks
    check_ranks: Callable[[RankEvidence], Answer] | None = None
    check_code: Callable[[CodeEvidence], Answer] | None = None
    check_run: Callable[[RunEvidence], Answer] | None = None
    severity: Severity = "info"
    needs: Literal["verdict", "comparison", "policies", "nothing"] = "verdict"
    gives_plan: bool = False
    wrong_gradients: bool = False

    def look(self, evidence: Evidence) -> Answer:
        """What the rule finds in one trace."""
        if self.check_code is not None:
            return self.look_at_code(evidence.code)
        if self.check_run is not None:
            return self.look_at_run(evidence.of_run)
        why = None
        if self.needs == "verdict":
            why = evidence.no_verdict
        elif self.needs == "policies":
            why = evidence.no_policies
        return self.check(evidence) if why is None else NotApplicable(why)

    def look_at_code(self, evidence: CodeEvidence | None) -> Answer:
        """What the rule finds in compiled code."""
        if evidence is None or self.check_code is None:
            return NotApplicable(NO_GRAPHS if self.check_code else NO_TRACE)
        return self.check_code(evidence)

    def look_at_run(self, evidence: RunEvidence) -> Answer:
        """What the rule finds in what the run itself saw."""
        if self.check_run is None:
            return NotApplicable(NO_TRACE)
        why = evidence.no_comparison if self.needs == "comparison" else None
        return self.check_run(evidence) if why is None else NotApplicable(why)

    def finding(
        self,
        seen: Evidence | RankEvidence | CodeEvidence | RunEvidence,
        title: str,
        detail: str,
        evidence: Sequence[str] = (),
        *,
        severity: Severity | None = None,
        confidence: Level | None = None,
        fix: Fix | None = None,
        saving_ms: float | None = None,
        saving_pct: float | None = None,
        wrong_gradients: bool | None = None,
    ) -> Finding:
        """A finding of this rule.

        Args:
            seen: What the rule looked at.
            title: What is wrong, one line.
            detail: Why, and what it costs, in sentences.
            evidence: What shows it, one line each.
            severity: Where it is not the rule's.
            confidence: Where it is not that of what was looked at.
            fix: What to change, where that is known.
            saving_ms: What the fix saves per step.
            saving_pct: The same as a share of the step, in percent.
            wrong_gradients: Where that is not as the rule says.
        """
        return Finding(
            code=self.code,
            name=self.name,
            severity=severity or self.severity,
            confidence=confidence or seen.confidence,
            title=title,
            detail=detail,
            evidence=tuple(evidence),
            fix=fix,
            saving_ms=saving_ms,
            saving_pct=saving_pct,
            wrong_gradients=self.wrong_gradients if wrong_gradients is None else wrong_gradients,
        )


def predicted(evidence: Evidence) -> Level:
    """Confidence in what is predicted from the counts: at most medium."""
    return "medium" if evidence.confidence == "high" else evidence.confidence


def describe(checkpoint: Checkpoint) -> str:
    """One checkpoint as a line of evidence: depth, mechanism, variant and call site."""
    variant = f", {checkpoint.variant}" if checkpoint.variant else ""
    options = "".join(f", {option.replace('-', ' ')}" for option in checkpoint.options)
    where = place(checkpoint.call_site)
    extent = "" if checkpoint.around == "block" else f", {checkpoint.extent}"
    return f"depth {checkpoint.depth}: {title_of(checkpoint)}{variant}{options}{extent}{where}"


def name_some(regions: Sequence[Region]) -> tuple[str, ...]:
    """The first few blocks, as lines of evidence."""
    return tuple(region.module or region.signature for region in regions[:_MOST_BLOCKS])
