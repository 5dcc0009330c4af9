"""How to check it: the exact commands that apply the fix, record again and read the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recompute_scan.report.commands import (
    fix_is_measurable,
    recorded_into,
    run_command,
    script_of,
)
from recompute_scan.report.section import Section
from recompute_scan.report.summary import saving
from recompute_scan.result import Result

# Of this many recomputes a fix leaves the one that is needed.
_TWICE = 2.0


def _check_commands(result: Result) -> list[tuple[str, str]]:
    """How to see for oneself that the fix works: what each step does, and the exact command.

    The same as a terminal names after ``run``, where that recorded the script into its own folder.
    """
    steps = []
    before, after = recorded_into(result), recorded_into(result, "-after")
    if fix_is_measurable(result) and result.verified is None:
        measured = run_command(result, verify=True)
        steps.append(("Measure the fix; nothing is edited.", measured))
    diff = next((item.fix.diff for item in result.findings if item.fix and item.fix.diff), None)
    if diff is not None:
        # patch takes an absolute path only as one below the folder it is told to start from
        patch = "patch -d / -p1" if diff.startswith("--- /") else "patch -p1"
        steps.append(("Save the diff as fix.diff and apply it.", f"{patch} < fix.diff"))
    again = run_command(result, after)
    steps.append(("Record the same steps again, into a folder of their own.", again))
    if script_of(result) is None:
        steps.append(("Read the new verdict.", f"recompute-scan analyze {after}"))
    else:
        compared = f"recompute-scan compare {before} {after}"
        steps.append(("Compare the two; the first folder is that of this page.", compared))
    return steps


def _html(result: Result) -> Mapping[str, Any]:
    saves = saving(result) is not None and result.recompute_per_backward == _TWICE
    measurable = fix_is_measurable(result)
    return {
        "commands": _check_commands(result),
        "tried": result.verified is not None and result.verified.after is not None,
        "after_ms": result.cost.predicted_step_ms if result.cost and saves and measurable else None,
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
