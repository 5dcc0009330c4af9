"""The bug report in an archive: filled in, from the cleaned result only."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.report import words
from recompute_scan.report.escape import markdown_code as code
from recompute_scan.report.escape import markdown_prose as prose
from recompute_scan.report.text import render_markdown
from recompute_scan.result import Result


def issue_text(result: Result, differences: Sequence[str], dropped: Sequence[str]) -> str:
    """A report for an issue tracker, in GitHub-flavoured Markdown.

    Args:
        result: The result as the archive gives it.
        differences: What differs from the original, one sentence each.
        dropped: What was left out of the trace, one phrase each.
    """
    parts = [
        f"## Activation recompute: {words.VERDICT_WORDS[result.verdict]}",
        "*What did you expect instead, and what does the training script do? (Two sentences.)*",
        "### Versions",
        _versions(result),
        "### What was found",
        render_markdown(result).rstrip("\n").replace("\n#### ", "\n##### "),
        "### Call sites, relative to their packages",
        _sites(result),
        "### How to reproduce",
        _reproduce(result),
        _left_out(differences, dropped),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _versions(result: Result) -> str:
    facts = {"recompute-scan": result.tool_version, **result.environment}
    return "\n".join(f"- {code(name, 60)} {code(value)}" for name, value in facts.items())


def _sites(result: Result) -> str:
    sites = dict.fromkeys(
        checkpoint.call_site
        for region in result.regions
        for checkpoint in region.checkpoints
        if checkpoint.call_site
    )
    if not sites:
        return "Not known: only a trace that `recompute-scan run` recorded names them."
    return "\n".join(f"- {code(site)}" for site in sites)


def _reproduce(result: Result) -> str:
    version = code(result.tool_version, 20)
    return "\n".join(
        [
            f"With the archive attached here, and recompute-scan {version}:",
            "",
            "```console",
            "$ recompute-scan analyze ARCHIVE.zip",
            "```",
            "",
            "With the script: `recompute-scan run SCRIPT`.",
        ]
    )


def _left_out(differences: Sequence[str], dropped: Sequence[str]) -> str:
    if not differences and not dropped:
        return "The archive gives the verdict, the counts and the cost of the original."
    lines = [f"- left out to make the archive small: {prose(phrase)}" for phrase in dropped]
    lines += [f"- differs from the original: {prose(sentence)}" for sentence in differences]
    return "\n".join(["### What the archive does not tell", "", *lines])
