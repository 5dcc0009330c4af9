"""How to check it: the exact commands that apply the fix, record again and read the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.commands import run_command, script_of
from recompute_scan.report.section import Section
from recompute_scan.result import Result

# The folder that the commands on the page record into.
_AFTER = "recompute-scan-after"


def _check_commands(result: Result) -> list[tuple[str, str]]:
    """How to see for oneself that the fix works: what each step does, and the exact command."""
    steps = []
    diff = next((item.fix.diff for item in result.findings if item.fix and item.fix.diff), None)
    if diff is not None:
        # patch takes an absolute path only as one below the folder it is told to start from
        patch = "patch -d / -p1" if diff.startswith("--- /") else "patch -p1"
        steps.append(("Save the diff as fix.diff and apply it.", f"{patch} < fix.diff"))
    again = run_command(result, _AFTER)
    steps.append(("Record the same steps again, into a folder of their own.", again))
    steps.append(("Read the new verdict.", f"recompute-scan analyze {_AFTER}"))
    return steps


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "commands": _check_commands(result),
        "to_change": any(item.fix for item in result.findings),
        "own_command": script_of(result) is not None,
    }


SECTION = Section(
    anchor="check",
    title="How to check it",
    template="how_to_check.html",
    present=lambda result: result.crash is None and result.verdict != "inconclusive",
    html=_html,
    link="Check",
)
