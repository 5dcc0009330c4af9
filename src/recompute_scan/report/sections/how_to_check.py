"""How to check it: the exact commands that apply the fix, record again and read the verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from recompute_scan.report.section import Section
from recompute_scan.result import Result

_PLAIN_SCRIPT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@%+-]{0,300}\.py")
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
    again = _run_again(result) or f"recompute-scan run --steps 5 -o {_AFTER} train.py"
    what = "whole steps" if result.verdict == "inconclusive" else "the same steps again"
    steps.append((f"Record {what}, into a folder of their own.", again))
    steps.append(("Read the new verdict.", f"recompute-scan analyze {_AFTER}"))
    return steps


def _run_again(result: Result) -> str | None:
    """The command that records the same script again, without the script's own arguments.

    The script's name came with the result, and people paste what a report tells them to run:
    a name that a shell would read more into gives ``None``.
    """
    target = result.environment.get("target", "")
    if not _PLAIN_SCRIPT.fullmatch(target):
        return None
    return f"recompute-scan run --steps 5 -o {_AFTER} {target}"


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "commands": _check_commands(result),
        "own_command": _run_again(result) is not None,
    }


SECTION = Section(
    anchor="check",
    title="How to check it",
    template="how_to_check.html",
    html=_html,
    link="Check",
)
