"""The result for an issue tracker: short, complete, and inert whatever the names hold.

Nothing from the result can close a fence, start markup, mention a person or refer to an issue.
"""

from __future__ import annotations

from recompute_scan.report.contents import sections_of
from recompute_scan.report.escape import markdown_code as code
from recompute_scan.result import Result


def render_markdown(result: Result) -> str:
    """The summary as GitHub-flavoured Markdown, ending in a line end."""
    parts = [section.markdown(result) for section in sections_of(result)]
    parts.append(f"recompute-scan {code(result.tool_version, 20)}")
    return "\n\n".join(part for part in parts if part) + "\n"
