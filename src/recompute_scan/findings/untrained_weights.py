"""RS104: weights inside a reentrant checkpoint that get no gradient, though nothing fails."""

from __future__ import annotations

from recompute_scan.findings.base import Answer, NotApplicable, Rule
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.units import plural

_MOST_NAMED = 6


def check(evidence: RunEvidence) -> Answer:
    """One finding, where the run saw trainable weights without a gradient."""
    names = evidence.untrained
    weights = evidence.fidelity.untrained if evidence.fidelity is not None else ()
    # A weight of a module that is named is no news.
    known = tuple(f"{name}." for name in names or ())
    modules = names or ()
    alone = tuple(one for one in weights if not one.startswith(known))
    if names is None:
        return NotApplicable("Only `recompute-scan run` sees which weights have a gradient.")
    if not (modules or alone):
        return []
    # What reads logs is loaded where there is something to say.
    from recompute_scan.diagnose.classify import Diagnosis, how_checked  # noqa: PLC0415 - above
    from recompute_scan.diagnose.outcome import finding_of  # noqa: PLC0415 - above
    from recompute_scan.diagnose.reentrant import SILENT  # noqa: PLC0415 - above

    seen = [
        f"after a backward pass, {what} {', '.join(some[:_MOST_NAMED])}{_more(len(some))}"
        for what, some in (
            ("no weight has a gradient in", modules),
            (f"{plural(len(alone), 'weight')} without a gradient:", alone),
        )
        if some
    ]
    shown = (*seen, how_checked(SILENT))
    return [finding_of(Diagnosis(SILENT, "high", shown))]


def _more(number: int) -> str:
    return f" and {number - _MOST_NAMED} more" if number > _MOST_NAMED else ""


RULE = Rule("RS104", "checkpoint-without-gradient", check_run=check, severity="warning")
