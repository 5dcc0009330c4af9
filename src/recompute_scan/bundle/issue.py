"""The bug report in an archive: filled in, from the cleaned result only."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from recompute_scan.advise.choice import NOT_READ
from recompute_scan.frameworks.registry import MECHANISMS
from recompute_scan.report import words
from recompute_scan.report.render import render_markdown
from recompute_scan.report.templating import markdown_code as code
from recompute_scan.report.templating import markdown_prose as prose
from recompute_scan.result import Finding, Result


def issue_text(
    result: Result, differences: Sequence[str], dropped: Sequence[str], before: Result | None = None
) -> str:
    """A report for an issue tracker, in GitHub-flavoured Markdown.

    Args:
        result: The result as the archive gives it.
        differences: What differs from the original, one sentence each.
        dropped: What was left out of the trace, one phrase each.
        before: The original, which knows by which of a library's names the script calls it.
    """
    result = replace(result, findings=tuple(_as_called(one, before) for one in result.findings))
    parts = [
        f"## Activation recompute: {words.VERDICT_WORDS[result.verdict]}",
        "*What did you expect instead, and what does the training script do? (Two sentences.)*",
        "### Versions",
        _versions(result),
        "### Findings",
        render_markdown(result).rstrip("\n").replace("\n#### ", "\n##### "),
        "### Call sites, relative to their packages",
        _sites(result),
        "### How to reproduce",
        _reproduce(result),
        _left_out(differences, dropped),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _as_called(finding: Finding, before: Result | None) -> Finding:
    """The finding with the name that the script's own call has; lines are not in an archive.

    Only names that a library gave come in from the original.
    """
    fix = finding.fix
    if fix is None:
        return finding
    reason = fix.reason
    if reason:
        reason = reason.replace(NOT_READ, "The archive holds no lines of the script, so no diff.")
    summary, keep, remove = fix.summary, fix.keep, fix.remove
    said = [each.fix.summary for each in before.findings if each.fix] if before else []
    for rename in (one for mechanism in MECHANISMS for one in mechanism.renames):
        old = any(rename.old in one and rename.new not in one for one in said)
        if old and rename.old not in summary:
            summary, keep, remove = (
                text.replace(rename.new, rename.old) for text in (summary, keep, remove)
            )
    fix = replace(fix, summary=summary, keep=keep, remove=remove, reason=reason)
    return replace(finding, fix=fix)


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
    return (
        f"With the archive attached here, and recompute-scan {version}:\n\n"
        "```console\n$ recompute-scan analyze ARCHIVE.zip\n```\n\n"
        "With the script: `recompute-scan run SCRIPT`."
    )


def _left_out(differences: Sequence[str], dropped: Sequence[str]) -> str:
    if not differences and not dropped:
        return "The archive gives the verdict, the counts and the cost of the original."
    lines = [f"- left out to make the archive small: {prose(phrase)}" for phrase in dropped]
    lines += [f"- differs from the original: {prose(sentence)}" for sentence in differences]
    return "\n".join(["### Left out, and different", "", *lines])
