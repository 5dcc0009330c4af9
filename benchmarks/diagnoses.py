"""Run every script that fails under ``recompute-scan run``, and print the code expected and found.

    python benchmarks/diagnoses.py              all of them
    python benchmarks/diagnoses.py kv_cache     some

Then the logs: one or more for each known failure, and failures that are none of them. Ends with 1
where an answer differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.diagnose.cases import CASES, run_case
from tests.diagnose.corpus import KNOWN, UNRELATED, answer, diagnosed, expected


def main(wanted: list[str]) -> int:
    wrong = 0
    print(f"{'case':<28}{'ranks':>5}  {'status':>6}  {'expected':<9}{'found':<9}")
    for case in CASES:
        if wanted and case.script not in wanted:
            continue
        head = f"{case.script:<28}{case.ranks:>5}"
        if case.missing is not None:
            print(f"{head}  {case.missing}; its log is among the logs below")
            continue
        with tempfile.TemporaryDirectory() as folder:
            ended = run_case(case, Path(folder))
            found = ended.code
        same = (found, ended.status) == (case.code, case.status)
        wrong += not same
        note = "" if same else "  <- differs"
        print(f"{head}  {ended.status:>6}  {case.code:<9}{found or '-':<9}{note}", flush=True)
    if wanted:
        return int(wrong > 0)
    missed = [path.name for path in KNOWN if answer(diagnosed(path)) != expected(path)]
    guessed = [path.name for path in UNRELATED if diagnosed(path).cause is not None]
    print(
        f"logs: {len(KNOWN)} of known failures, {len(missed)} not or wrongly recognised; "
        f"{len(UNRELATED)} of others, {len(guessed)} wrongly recognised"
    )
    for name in (*missed, *guessed):
        print(f"  {name}")
    return int(wrong > 0 or bool(missed) or bool(guessed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
