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

from recompute_scan.lint import lint


def answer(case: Case, folder: Path) -> tuple[str, ...]:
    """The codes that are found in the case's files."""
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return tuple(finding.code for finding in lint([folder]).found)


def main() -> int:
    """Print a line for each case, and the counts."""
    wrong = false = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = answer(case, Path(folder))
        wrong += found != case.codes
        false += "RS601" in found and "RS601" not in case.codes
        mark = "" if found == case.codes else "  WRONG"
        print(f"{case.name:<50}{','.join(case.codes):<8}{','.join(found):<8}{mark}")
    clean = sum(not case.codes for case in CASES)
    public = sum(bool(case.origin) for case in CASES)
    print(
        f"{len(CASES)} cases, {clean} of them clean, {public} with the keys of public files: "
        f"{wrong} wrong, {false} falsely RS601"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
