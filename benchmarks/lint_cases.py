"""What ``recompute-scan lint`` says of scripts and configurations whose truth is known.

    python benchmarks/lint_cases.py

Ends with 1 where an answer differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.lint.cases import CASES, Case
from tests.lint.found_cases import FOUND
from tests.lint.framework_cases import FRAMEWORKS, HELD_OUT
from tests.lint.nested_cases import NESTED

from recompute_scan.lint import lint

ALL = {
    "pairs": CASES,
    "frameworks": FRAMEWORKS,
    "held out": HELD_OUT,
    "found": FOUND,
    "nested": NESTED,
}


def answer(case: Case, folder: Path) -> tuple[str, ...]:
    """The codes that are found in the case's files."""
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return tuple(finding.code for finding in lint([folder]).found)


def _score(title: str, cases: tuple[Case, ...]) -> int:
    """Print a line for each case, and the counts; how many were wrong."""
    wrong = false = found_sure = 0
    print(f"-- {title}")
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = answer(case, Path(folder))
        wrong += found != case.codes
        false += "RS601" in found and "RS601" not in case.codes
        found_sure += "RS601" in found and "RS601" in case.codes
        mark = "" if found == case.codes else "  WRONG"
        print(f"{case.name:<56}{','.join(case.codes):<8}{','.join(found):<8}{mark}")
    clean = sum(not case.codes for case in cases)
    public = sum(bool(case.origin) for case in cases)
    sure = sum("RS601" in case.codes for case in cases)
    print(
        f"{title}: {len(cases)} cases, {clean} clean, {public} with the keys of public files: "
        f"{wrong} wrong, {false} falsely RS601, {found_sure} of {sure} certain doublings found"
    )
    return wrong


def main() -> int:
    """Print four tables: 1 where an answer of any differs."""
    return int(sum([_score(title, cases) for title, cases in ALL.items()]) > 0)


if __name__ == "__main__":
    sys.exit(main())
