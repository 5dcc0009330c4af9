"""Every rule and what became of it: what was looked for, and what this trace cannot tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from recompute_scan.report.section import Section
from recompute_scan.report.words import STATUS_WORDS
from recompute_scan.result import Result
from recompute_scan.units import plural


def _html(result: Result) -> Mapping[str, Any]:
    """How many rules came to what, in words."""
    counts = Counter(rule.status for rule in result.checked)
    said = [f"{number} {STATUS_WORDS[status]}" for status, number in counts.most_common()]
    return {"count": f"{plural(len(result.checked), 'rule')}: {', '.join(said)}"}


SECTION = Section(
    anchor="rules",
    title="Every rule and what became of it",
    template="every_rule.html",
    present=lambda result: bool(result.checked),
    html=_html,
    link="Rules",
)
