"""Method, words and raw data: how the counting works, and the whole result as JSON."""

from __future__ import annotations

from recompute_scan.report.section import Section, always

SECTION = Section(
    anchor="method",
    title="Method, words and raw data",
    template="method.html",
    present=always,
    link="Method",
)
