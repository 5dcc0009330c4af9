"""What `lint` says of scripts and configurations whose truth is known.

The status is 1 where an answer differs.
"""

import tempfile
from pathlib import Path

from tests.lint.cases import CASES, FOUND, FRAMEWORKS, HELD_OUT, Case, answer
from tests.lint.nested_cases import NESTED

from benchmarks._frame import Table, benchmark

ALL = {
    "pairs": CASES,
    "frameworks": FRAMEWORKS,
    "held out": HELD_OUT,
    "found": FOUND,
    "nested": NESTED,
}


@benchmark
def main() -> int:
    return int(sum([_score(title, cases) for title, cases in ALL.items()]) > 0)


def _score(title: str, cases: tuple[Case, ...]) -> int:
    """Print a line for each case, and the counts; how many were wrong."""
    wrong = false = found_sure = 0
    table = Table({f"-- {title}": "<56", "expected": "<8", "found": "<8"})
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = answer(case, Path(folder))
        wrong += found != case.codes
        false += "RS601" in found and "RS601" not in case.codes
        found_sure += "RS601" in found and "RS601" in case.codes
        note = "" if found == case.codes else "  WRONG"
        table.row(case.name, ",".join(case.codes), ",".join(found), note=note)
    clean = sum(not case.codes for case in cases)
    public = sum(bool(case.origin) for case in cases)
    sure = sum("RS601" in case.codes for case in cases)
    print(
        f"{title}: {len(cases)} cases, {clean} clean, {public} with the keys of public files: "
        f"{wrong} wrong, {false} falsely RS601, {found_sure} of {sure} certain doublings found"
    )
    return wrong
