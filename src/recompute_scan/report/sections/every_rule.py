"""Every rule and what became of it: what was looked for, and what this trace cannot tell."""

from __future__ import annotations

from recompute_scan.report.section import Section, always

SECTION = Section(
    anchor="rules",
    title="Every rule and what became of it",
    template="every_rule.html",
    present=always,
    link="Rules",
)
