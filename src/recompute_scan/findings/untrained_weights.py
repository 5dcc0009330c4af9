"""RS104: weights inside a reentrant checkpoint that get no gradient, though nothing fails."""

from __future__ import annotations

from recompute_scan.findings.base import Answer, NotApplicable, Rule
from recompute_scan.findings.evidence import RunEvidence

_MOST_NAMED = 6


def check(evidence: RunEvidence) -> Answer:
    """One finding, where the run saw trainable weights without a gradient."""
    names = evidence.untrained
    weights = evidence.fidelity.untrained if evidence.fidelity is not None else ()
    # A weight of a module that is named is no news.
    known = tuple(f"{name}." for name in names or ())
    names = (*(names or ()), *(one for one in weights if not one.startswith(known))) or names
    if names is None:
        return NotApplicable("Only `recompute-scan run` sees which weights have a gradient.")
    if not names:
        return []
    # What reads logs is loaded where there is something to say.
    from recompute_scan.diagnose.classify import Diagnosis, how_checked  # noqa: PLC0415 - above
    from recompute_scan.diagnose.outcome import finding_of  # noqa: PLC0415 - above
    from recompute_scan.diagnose.reentrant import SILENT  # noqa: PLC0415 - above

    named = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    seen = f"after a backward pass, no weight has a gradient in {named}"
    shown = (f"{seen}{f' and {more} more' if more > 0 else ''}", how_checked(SILENT))
    return [finding_of(Diagnosis(SILENT, "high", shown))]


RULE = Rule("RS104", "checkpoint-without-gradient", check_run=check, severity="warning")
