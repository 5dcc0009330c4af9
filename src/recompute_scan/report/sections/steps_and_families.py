"""Steps and operator families: the counts that everything above is made from."""

from __future__ import annotations

from recompute_scan.report.section import Section, analysed

SECTION = Section(
    anchor="steps",
    title="Steps and operator families",
    template="steps_and_families.html",
    present=lambda result: analysed(result) and bool(result.steps or result.families),
)
